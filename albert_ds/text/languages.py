"""The languages that --language takes: their scripts, and where their sentences end.

The splitter, sentencex, has rules for some 30 languages and passes others on to a related one or to
general rules; it takes any code at all, so the codes are listed here. It never splits Thai, Lao,
Khmer or Tibetan: those have rules here.
"""

import re
import unicodedata

from sentencex import segment  # ty: ignore[import-not-found]

from albert_ds.base.cli import suggest
from albert_ds.vocab.words import is_unspaced

_BY_SCRIPT = {
    "LATIN": "af an ast az bar br bs ca co cs cy da de en eo es et eu fi fo fr fy ga gd gl gn ha "
    "hr ht hu id ig io is it jv ku la lb lt lv mg mi ms mt nb nds nl nn no oc pl pt qu rm ro sc "
    "sco scn sh sk sl so sq su sv sw tk tl tr uz vec vi wa wo xh yo zu",
    "CYRILLIC": "ba be bg ce cv kk ky mk mn os ru rue sah sr tg tt tyv udm uk",
    "ARABIC": "ar ary arz azb ckb fa ks ps sd ug ur",
    "HEBREW": "he yi",
    "GREEK": "el",
    "ARMENIAN": "hy",
    "GEORGIAN": "ka",
    "DEVANAGARI": "awa bho hi mai mr ne sa",
    "BENGALI": "as bn bpy",
    "GURMUKHI": "pa",
    "GUJARATI": "gu",
    "ORIYA": "or",
    "TAMIL": "ta",
    "TELUGU": "te",
    "KANNADA": "kn",
    "MALAYALAM": "ml",
    "SINHALA": "si",
    "ETHIOPIC": "am ti",
    "THAI": "th",
    "LAO": "lo",
    "KHMER": "km",
    "MYANMAR": "my",
    "TIBETAN": "bo dz",
    "HANGUL": "ko",
    "CJK": "ja lzh wuu yue zh",
}
_MORE_SCRIPTS = {
    "ja": ("HIRAGANA", "KATAKANA"),
    "ko": ("CJK",),
    "sr": ("LATIN",),
    "uz": ("CYRILLIC",),
    "ku": ("ARABIC",),
    "kk": ("LATIN", "ARABIC"),
    "mn": ("MONGOLIAN",),
    "az": ("CYRILLIC", "ARABIC"),
}
SCRIPTS: dict[str, tuple[str, ...]] = {
    code: (script, *_MORE_SCRIPTS.get(code, ()))
    for script, codes in _BY_SCRIPT.items()
    for code in codes.split()
}
# As CLDR calls them in English.
_NAMED = (
    "af Afrikaans, am Amharic, an Aragonese, ar Arabic, ary Moroccan Arabic, arz Egyptian "
    "Arabic, as Assamese, ast Asturian, awa Awadhi, az Azerbaijani, azb South Azerbaijani, ba "
    "Bashkir, bar Bavarian, be Belarusian, bg Bulgarian, bho Bhojpuri, bn Bengali, bo "
    "Tibetan, bpy Bishnupriya, br Breton, bs Bosnian, ca Catalan, ce Chechen, ckb Central "
    "Kurdish, co Corsican, cs Czech, cv Chuvash, cy Welsh, da Danish, de German, dz Dzongkha, "
    "el Greek, en English, eo Esperanto, es Spanish, et Estonian, eu Basque, fa Persian, fi "
    "Finnish, fo Faroese, fr French, fy Western Frisian, ga Irish, gd Scottish Gaelic, gl "
    "Galician, gn Guarani, gu Gujarati, ha Hausa, he Hebrew, hi Hindi, hr Croatian, ht "
    "Haitian Creole, hu Hungarian, hy Armenian, id Indonesian, ig Igbo, io Ido, is Icelandic, "
    "it Italian, ja Japanese, jv Javanese, ka Georgian, kk Kazakh, km Khmer, kn Kannada, ko "
    "Korean, ks Kashmiri, ku Kurdish, ky Kyrgyz, la Latin, lb Luxembourgish, lo Lao, lt "
    "Lithuanian, lv Latvian, lzh Literary Chinese, mai Maithili, mg Malagasy, mi Maori, mk "
    "Macedonian, ml Malayalam, mn Mongolian, mr Marathi, ms Malay, mt Maltese, my Burmese, nb "
    "Norwegian Bokmal, nds Low German, ne Nepali, nl Dutch, nn Norwegian Nynorsk, no "
    "Norwegian, oc Occitan, or Odia, os Ossetic, pa Punjabi, pl Polish, ps Pashto, pt "
    "Portuguese, qu Quechua, rm Romansh, ro Romanian, ru Russian, rue Rusyn, sa Sanskrit, sah "
    "Yakut, sc Sardinian, scn Sicilian, sco Scots, sd Sindhi, sh Serbo-Croatian, si Sinhala, "
    "sk Slovak, sl Slovenian, so Somali, sq Albanian, sr Serbian, su Sundanese, sv Swedish, "
    "sw Swahili, ta Tamil, te Telugu, tg Tajik, th Thai, ti Tigrinya, tk Turkmen, tl Tagalog, "
    "tr Turkish, tt Tatar, tyv Tuvinian, udm Udmurt, ug Uyghur, uk Ukrainian, ur Urdu, uz "
    "Uzbek, vec Venetian, vi Vietnamese, wa Walloon, wo Wolof, wuu Wu Chinese, xh Xhosa, yi "
    "Yiddish, yo Yoruba, yue Cantonese, zh Chinese, zu Zulu"
)
NAMES = {each.partition(" ")[0]: each.partition(" ")[2] for each in _NAMED.split(", ")}
WITHOUT_SPACES = frozenset(
    code
    for script in ("THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "CJK")
    for code in _BY_SCRIPT[script].split()
)
SENTENCE_ENDS = ("rules", "spaces")
_ENDED_BY_SPACES = ("th", "lo")
_OWN_MARKS = {
    "km": re.compile("(?<=[\u17d4\u17d5])\\s*"),
    "bo": re.compile("(?<=[\u0f0d-\u0f12])(?![\u0f0d-\u0f12])\\s*"),
}
_OWN_MARKS["dz"] = _OWN_MARKS["bo"]
_REPEATS = "\u0e46\u0e2f\u0ec6\u0eaf"  # signs of repetition and abbreviation after a word


def name_languages(word: str) -> str:
    """The code and name of the languages that a wrong code may mean; of all, if it fits none."""
    near = [code for code, name in NAMES.items() if word.lower() in (name.lower(), code.lower())]
    near = near or [c for c, name in NAMES.items() if suggest(word.title(), name.split())]
    return ", ".join(f"{code} ({NAMES[code]})" for code in near or NAMES)


def default_ends(language: str) -> str:
    """What ends a sentence if nothing else is asked for, of SENTENCE_ENDS."""
    return "spaces" if language in _ENDED_BY_SPACES else "rules"


def split_paragraph(paragraph: str, language: str, ends: str | None) -> list[str]:
    """The sentences of a paragraph; `ends` of SENTENCE_ENDS, None for what suits the language."""
    ends = ends or default_ends(language)
    # Blanks that are not ASCII (a no-break space after an initial) make sentencex 1.0.32 panic.
    paragraph = " ".join(paragraph.split())
    if ends == "spaces":
        sentences = _split_at_spaces(paragraph)
    else:
        sentences = segment(language, paragraph)
        if language in _OWN_MARKS:
            sentences = [part for text in sentences for part in _OWN_MARKS[language].split(text)]
    return [sentence for sentence in map(str.strip, sentences) if sentence]


def _split_at_spaces(paragraph: str) -> list[str]:
    """Cut where a space stands between two letters of a script without spaces between words.

    A space beside a number or a word of another script is no end, nor is one beside a sign of
    repetition.
    """
    first, *rest = paragraph.split(" ")
    sentences = [first]
    for part in rest:
        before = sentences[-1][-1:]
        after = part[:1]
        repeats = before in _REPEATS or after in _REPEATS
        if _is_letter(before) and _is_letter(after) and not repeats:
            sentences.append(part)
        else:
            sentences[-1] += " " + part
    return sentences


def _is_letter(char: str) -> bool:
    return bool(char) and unicodedata.category(char)[0] in "LM" and is_unspaced(char)


def join_lines(lines: list[str]) -> str:
    """Wrapped lines as one paragraph; between letters of a script without spaces, without one."""
    text = lines[0] if lines else ""
    for line in lines[1:]:
        before = text[-1]
        after = line[0]
        is_wide_mark = any(
            unicodedata.category(char)[0] == "P" and is_unspaced(char) for char in (before, after)
        )
        unspaced = is_wide_mark or (is_unspaced(before) and is_unspaced(after))
        text += line if unspaced else " " + line
    return text


def needs_no_space(before: str, after: str) -> bool:
    """Whether a segmenter put the space between two characters, as plain text has none there.

    One of them is of a script without spaces, or a mark of its own such as a curved quote.
    """
    return any(
        is_unspaced(char) or (not char.isascii() and unicodedata.category(char)[0] == "P")
        for char in (before, after)
    )
