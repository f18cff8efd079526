"""The vocabulary of generated answers: 256 plain words, one byte of randomness each, one token each."""

from __future__ import annotations

WORDS: tuple[str, ...] = tuple(
    """
about above across after again against air all almost alone along already also although always among
and animal answer any apple area around arrive art ask autumn away back balance bank basket beach bear
become before begin behind believe below beside best better between beyond big bird black blue board boat
body book both bottle bottom bread bridge bright bring broad brother brown build busy but butter button
call calm can candle care carry castle catch cause central chair chance change cheese child choose circle
city clean clear climb clock close cloud coast coat coffee cold colour come common cook cool copper corn
corner cotton count country course cover cross cry cup current curtain cut dance dark daughter day deep
desert desk dinner distance door down draw dream dress drink drive dry during dust each early earth east
easy edge egg eight either else empty end engine enough enter even evening ever every exact eye face fair
fall family far farm fast father feather few field fifth figure fill final find fine finger fire first fish
five flag flat floor flower follow food foot forest forget form four fresh friend from fruit full garden
gate gentle girl give glad glass goat gold good grain grass great green ground group grow guess guide half
hammer hand happy harbour hard harvest hat have head hear heart heat heavy help here hill history hold hole
home honey hope horse hot hour house how hundred hurry ice idea inside island
journey juice keep key kind king kitchen knife lake lamp
""".split()
)

if len(WORDS) != 256 or len(set(WORDS)) != 256:
    raise AssertionError(f"the vocabulary must hold 256 different words, it holds {len(set(WORDS))}")
