"""Made-up text in four languages, and three tasks in it, in the formats that commands read.

The same on every machine: Python promises the same numbers of random.Random for a seed.
"""

import gzip
import json
import random
from pathlib import Path

FILES = 4
DOCUMENTS = 30  # of a file


def make_words(language: str) -> list[str]:
    draw = random.Random(language)
    if language == "zh":
        syllables = [chr(0x4E00 + 13 * number) for number in range(250)]
    elif language == "th":
        consonants = "กขคงจชดตทนบปพมยรลวสหอ"
        syllables = [a + b for a in consonants for b in ("า", "ี", "ู", "ิ่", "้อ", "ัน")]
    else:
        vowels = ["a", "e", "i", "o", "u", *(["ä", "ö", "ü", "aß"] if language == "de" else [])]
        syllables = [a + b for a in "bdfgklmnprst" for b in vowels]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(1500)]
    return words + (["1984", "3,5", "Dr.", "don't", "well-known"] if language == "en" else [])


def make_sentences(language: str, count: int, seed: int) -> list[str]:
    draw = random.Random(f"{language} {seed}")
    words = make_words(language)
    between, end = ("", "。") if language == "zh" else ("", "") if language == "th" else (" ", ".")
    return [
        between.join(draw.choices(words, k=draw.randint(4, 14))).capitalize() + end
        for _ in range(count)
    ]


def write_text(folder: Path, language: str) -> str:
    """Write documents, in another format for each language; returns the glob of the files."""
    folder.mkdir(parents=True)
    draw = random.Random(f"documents {language}")
    for number in range(FILES):
        documents = []
        for position in range(DOCUMENTS):
            seed = number * DOCUMENTS + position
            sentences = make_sentences(language, draw.randint(1, 40), seed)
            lines = (" ".join(sentences[i : i + 3]) for i in range(0, len(sentences), 3))
            documents.append("\n".join(lines))
        if language == "en":  # as WikiExtractor writes them
            documents = [f'<doc id="{i}">\n{text}\n</doc>' for i, text in enumerate(documents)]
            name = "wiki"
            text = "\n".join(documents)
        elif language == "zh":
            name = "jsonl"
            text = "\n".join(json.dumps({"text": text}) for text in documents)
        else:
            name = "txt"
            text = "\n\n".join(documents)
        path = folder / f"{number}.{name}"
        content = (text + "\n").encode()
        if language == "th":
            path = folder / f"{number}.{name}.gz"
            content = gzip.compress(content, mtime=0)
        path.write_bytes(content)
    return str(folder / "*")


def write_mrpc(folder: Path) -> None:
    folder.mkdir(parents=True)
    for seed, split in enumerate(("train", "dev", "test")):
        rows = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
        sentences = make_sentences("en", 48, 1000 + seed)
        for number, (one, two) in enumerate(zip(sentences[::2], sentences[1::2], strict=True)):
            label, other = (1, one.lower()) if number % 3 else (0, two)
            rows.append(f"{number if split == 'test' else label}\t1\t2\t{one}\t{other}")
        if split == "test":
            rows[0] = rows[0].replace("Quality", "index")
        (folder / f"{split}.tsv").write_text("\n".join(rows) + "\n")


def write_squad2(folder: Path) -> None:
    folder.mkdir(parents=True)
    for seed, split in enumerate(("train", "dev")):
        paragraphs = []
        for number in range(8):
            *sentences, question = make_sentences("en", 7, 2000 + 100 * seed + number)
            context = " ".join(sentences)  # longer than one window
            text = sentences[number % 6].split()[1]
            answers = [{"text": text, "answer_start": context.index(text)}]
            asked = {"id": f"{split}{number}", "question": f"{question} {text}?"}
            none = {"id": f"{split}{number}n", "question": question, "answers": []}
            questions = [asked | {"answers": answers}, none | {"is_impossible": True}]
            paragraphs.append({"context": context, "qas": questions})
        content = {"version": "v2.0", "data": [{"title": "t", "paragraphs": paragraphs}]}
        (folder / f"{split}-v2.0.json").write_text(json.dumps(content))


def write_race(folder: Path) -> None:
    for seed, split in enumerate(("train", "dev", "test")):
        for level in ("middle", "high"):
            (folder / split / level).mkdir(parents=True)
            for number in range(4):
                sentences = make_sentences("en", 15, 3000 + 100 * seed + 10 * number + len(level))
                content = {
                    "article": " ".join(sentences[:5]),
                    "questions": [f"{sentences[5][:-1]} _ .", sentences[6][:-1] + "?"],
                    "options": [sentences[7:11], sentences[11:15]],
                    "answers": ["ABCD"[number], "DCBA"[number]],
                }
                (folder / split / level / f"{number}.txt").write_text(json.dumps(content))
