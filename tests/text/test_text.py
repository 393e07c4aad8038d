"""Text in any language: its sentences, its script, its encoding, and what normalisation does."""

import json

import pytest

from albert_ds.base.errors import DamagedData, UserError
from albert_ds.text.documents import TextConfig
from albert_ds.text.languages import SCRIPTS
from albert_ds.text.sources import cut_units
from albert_ds.text.survey import report_survey, survey_text
from albert_ds.text.vocabulary import VocabConfig, build_vocab
from albert_ds.vocab.vocab import RELEASED, Normalisation
from tests.data.corpus import build, make_documents, write_wiki
from tests.data.test_languages import SENTENCES

GERMAN = "Der schöne Tag war schon vorbei. Die Größe überraschte alle Gäste. "
RUSSIAN = "Это обычный русский текст. Он записан в старой кодировке. "
JAPANESE = "これは日本語の文章です。古い文字コードで書かれています。"


def survey_of(tmp_path, text, normalisation=None, **config):
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    units = cut_units([str(path)])
    return survey_text(units, TextConfig(**config), normalisation or Normalisation())


def split(lines, kind, language, ends=None):
    return TextConfig(language=language, lines=kind, sentence_ends=ends).split(lines)


def test_sentences_of_scripts_without_a_full_stop():
    thai = "ภาษาไทยเป็นภาษา และออกเสียงต่าง ๆ กัน กด Enter เพื่อ ปี 2540 ต่อ"
    assert split([thai], "paragraph", "th") == [
        "ภาษาไทยเป็นภาษา",
        "และออกเสียงต่าง ๆ กัน",
        "กด Enter เพื่อ",
        "ปี 2540 ต่อ",
    ]
    assert split([thai], "paragraph", "th", "rules") == [thai]
    assert split(["ភាសា។ ខ្មែរ។"], "paragraph", "km") == ["ភាសា។", "ខ្មែរ។"]
    assert split(["བོད། སྐད།"], "paragraph", "bo") == ["བོད།", "སྐད།"]
    assert split(["မြန်မာ။ စာပေ။"], "paragraph", "my") == ["မြန်မာ။", "စာပေ။"]
    assert split(["日本語。中国語。"], "paragraph", "ja") == ["日本語。", "中国語。"]
    assert split(["한국어다. 좋다!"], "paragraph", "ko") == ["한국어다.", "좋다!"]
    assert split(["هل هذا؟ نعم."], "paragraph", "ar") == ["هل هذا؟", "نعم."]


def test_wrapped_lines_are_joined_as_their_script_is_written():
    assert split(["これは日本", "語です。"], "wrapped", "ja") == ["これは日本語です。"]
    assert split(["ภาษา", "ไทย"], "wrapped", "th") == ["ภาษาไทย"]
    assert split(["한국어는", "아름답다."], "wrapped", "ko") == ["한국어는 아름답다."]
    assert split(["日本の", "Linux", "です。"], "wrapped", "ja") == ["日本の Linux です。"]


def test_an_unknown_language_is_refused_with_the_list():
    with pytest.raises(
        UserError, match=r"--language klingon: must be a code: af \(Afrikaans\), .*"
    ):
        TextConfig(language="klingon")
    assert {"ko", "th", "ar", "ja", "zh", "vi", "de", "km", "lo", "my", "bo"} <= SCRIPTS.keys()


def test_text_in_another_script_is_refused(tmp_path):
    with pytest.raises(UserError, match="0% of the letters of the text are LATIN, and 100% are HA"):
        survey_of(tmp_path, SENTENCES["ko"])
    assert survey_of(tmp_path, SENTENCES["ko"], any_script=True).figures["script"] == "HANGUL"
    for code in ("ar", "bn", "de", "hi", "ja", "km", "ko", "ru", "th", "vi", "fa"):
        survey = survey_of(tmp_path, SENTENCES[code], language=code)
        assert survey.figures["script"] in SCRIPTS[code]


@pytest.mark.parametrize(
    "encoding, text, name",
    [
        ("euc_jp", JAPANESE, "EUC-JP"),
        ("shift_jis", JAPANESE, "SHIFT-JIS"),
        ("cp1252", GERMAN, "WINDOWS-1252"),
        ("utf_16", GERMAN, "UTF-16"),
        ("koi8_r", RUSSIAN, "KOI8-R"),
    ],
)
def test_another_encoding_is_named_by_both_tools(tmp_path, vocab, encoding, text, name):
    path = tmp_path / "text.txt"
    path.write_bytes("\n\n".join([text * 3] * 4).encode(encoding))
    words = rf"text.txt: line 1: not UTF-8; it looks like {name}: convert it with iconv -f {name} "
    with pytest.raises(UserError, match=words):
        build_vocab([str(path)], tmp_path / "vocab", VocabConfig(vocab_size=100))
    with pytest.raises(UserError, match=words):
        build(tmp_path / "data", vocab, [path])
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]


def test_too_many_damaged_documents_end_build_vocab_too(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "Some words."}\n' * 50 + "{broken\n" * 9)
    with pytest.raises(DamagedData, match="9 damaged documents, beside 50 sound ones"):
        build_vocab([str(path)], tmp_path / "vocab", VocabConfig(vocab_size=50))


def test_what_normalisation_did_is_counted_apart_from_lower_case(tmp_path):
    text = "schon schön Schon war wäre waren wären Haus haus"
    kept = survey_of(tmp_path, text, language="de").figures
    assert (kept["merged_words"], kept["changed_characters"]) == (0, 0)
    assert (kept["case_merged_words"], kept["lower_cased_characters"]) == (4, 2)
    stripped = survey_of(tmp_path, text, RELEASED, language="de").figures
    assert stripped["merged_words"] == 4  # schon, schön, waren, wären
    assert set(stripped["merged_examples"]) == {"schon = schön", "waren = wären"}
    assert stripped["changed_characters"] == 3 and stripped["case_merged_words"] == 4
    katakana = survey_of(tmp_path, "パスとバスとハス", RELEASED, language="ja").figures
    assert katakana["merged_examples"] == ["パス = バス = ハス"]


def test_merged_words_are_warned_of_and_unknown_ones_refused(tmp_path, capsys, vocab):
    survey = survey_of(tmp_path, "schon schön " * 9, RELEASED, language="de")
    report = report_survey(survey, vocab, TextConfig(max_unknown=1.0))
    assert any("schon = schön" in line for line in report)
    assert "100.0% of the different words became equal" in capsys.readouterr().err
    survey = survey_of(tmp_path, SENTENCES["ko"], language="ko")
    with pytest.raises(UserError, match="of the tokens are unknown, over --max-unknown 0.01"):
        report_survey(survey, vocab, TextConfig())
    assert report_survey(survey, vocab, TextConfig(max_unknown=1.0))
    assert capsys.readouterr().err == ""


def test_the_figures_are_in_the_index(tmp_path, vocab, corpus):
    index = build(tmp_path / "data", vocab, [corpus], language="en")
    text = json.loads((tmp_path / "data" / "index.json").read_text())["text"]
    assert text == index["text"]
    assert text["script"] == "LATIN" and text["merged_words"] == 0
    assert text["changed_characters"] == 0 < text["lower_cased_characters"]


def test_short_documents_and_long_sentences_are_warned_of(tmp_path, vocab, capsys):
    paragraphs = [[sentence] for document in make_documents(30) for sentence in document]
    build(tmp_path / "short", vocab, [write_wiki(tmp_path / "a", paragraphs)], sequence_length=512)
    assert (
        "if documents are that short, a smaller --sequence-length suits" in capsys.readouterr().err
    )
    long = [[" ".join(document).replace(".", "")] * 3 for document in make_documents(30)]
    build(tmp_path / "long", vocab, [write_wiki(tmp_path / "b", long)], sequence_length=64)
    assert "see --language, --lines and --sentence-ends" in capsys.readouterr().err
    fitting = write_wiki(tmp_path / "c", make_documents(900))
    build(tmp_path / "fitting", vocab, [fitting], sequence_length=128)
    assert "--sequence-length" not in (said := capsys.readouterr().err) and "--lines" not in said
