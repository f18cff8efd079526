"""Generated text to train the tiny model's tokenizer on: common words, their forms, and plain sentences."""

from __future__ import annotations

import random
from collections.abc import Iterator

# The model learns nothing; the tokenizer needs enough different words to fill its vocabulary.
STEMS = """
accept account act add address agree allow answer appear apply area argue arm arrive ask attempt audience
average bank base batch bear begin block board body book border bottle branch break breath bridge bright
bring brother budget build burn button buy cache call camera capacity capital card care carry case catch
cause cell center chain chair chance change channel charge chart check choice circle claim class clean clear
client climb clock close cloud coast code collect color column come command common compare complete compute
concern connect consider contain context control cook copy corner cost count country couple course cover
create cross crowd current curve custom cut cycle daily damage dance danger data daughter day deal decide
deep degree deliver demand depend describe design desk detail develop device differ dinner direct discover
discuss distance doctor document door doubt draft draw dream dress drink drive drop dry early earn earth
east easy edge edit effect effort elect emerge empty energy engine enjoy enter equal error escape estimate
even event exact example except exchange exist expect expense expert explain express extend face factor fail
fair fall family famous farm fast father feature feel field fight figure file fill final find finger finish
fire first fish fit fix flag flat flight floor flow flower fly focus follow force foreign forest forget form
forward frame free fresh friend front fruit function future gain game garden gather general gentle gift give
glass goal gold govern grand grant graph great green ground group grow guard guess guest guide habit half
hand handle hang happen happy hard head health hear heart heat heavy height help hide high hill history hold
hole holiday home hope horse hospital hotel hour house huge human hundred hunt hurry idea image imagine
impact improve include increase indicate industry inform input inside insist instance intend interest invite
iron island issue item job join journey judge jump keep key kind kitchen knock know label labor lack lake
land language large last late laugh launch layer lead learn leave legal length lesson letter level library
lie life lift light limit line link list listen little live load local lock logic long look lose loss love
lower lucky lunch machine main major manage manner map march mark market master match matter mean measure
meet member memory mention message metal method middle mile mind minute mirror miss mission mix model modern
moment money month moon moral morning mother motion mountain mouth move music name narrow nation native
nature near need network never new night noise normal north note notice number object observe obtain occur
ocean offer office open operate option orange order organ origin other output outside own package page paint
pair paper parent park part pass past path pattern pause pay people perfect perform period permit person
phone photo phrase pick picture piece place plain plan plane plant plate play please point police policy
pool poor popular port position possible post pound power practice prefer prefix prepare present press
pretty prevent price print private prize probable problem process produce product profit program progress
project promise proof proper protect proud prove provide public pull purpose push quality quarter question
queue quick quiet quote race radio rain raise random range rank rate reach read ready real reason receive
recent recipe record red reduce refer refuse region regular relate release remain remember remove repair
repeat reply report request require rescue rest result return reveal review reward rich ride right ring rise
risk river road rock role roll roof room root rough round route row rule run sail salt same sample sand save
scale scene school science score screen search season seat second secret section seed seek seem select sell
send sense separate series serious serve session set settle seven shade shake shape share sharp shelf shell
shift shine ship shirt shock shoe shop short shot shoulder shout show side sign signal silence silver
similar simple sing single sister site size skill skin sleep slice slide slow small smart smile smoke smooth
snow social society soft soil soldier solid solve song sort soul sound source south space speak special
speed spend spirit split sport spot spread spring square stable stage stair stand standard star start state
station stay steady steel step stick still stock stone stop store storm story straight strange stream street
strength stress stretch strike string strong structure student study style subject succeed sudden suffer
sugar suggest suit summer supply support suppose sure surface surprise surround sweet swim switch system
table tail take talk tall target task taste teach team tell temple tend term test text thank theory thick
thin thing think third thread three throw thunder ticket tie tight time tiny title together token tomorrow
tone tool topic total touch tour toward tower town track trade train transfer travel treat tree trial trick
trip trouble truck true trust truth try turn twelve twenty type uncle under unit until update upper use
usual valley value variety various vast version video view village visit voice volume wait wake walk wall
want warm warn wash watch water wave weak wealth wear weather week weigh weight west wheel while whole wide
wife wild will wind window winter wire wise wish wonder wood word work world worry worth wrap write wrong
yard year yellow yesterday yield young zero zone
""".split()
SMALL = """
the of and a to in is it that for on with as was at by be this have from or one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these
would other into has more her two like him see could no make than been its who now over only may after most
""".split()
ENDINGS = ("s", "ed", "ing", "er", "ly", "able", "ment", "ness", "ful", "ion", "ive")
BEGINNINGS = ("re", "un", "over", "out", "pre", "mis", "inter")


def inflected(stem: str, ending: str) -> str:
    """The stem with an ending, by the plainest of spelling rules."""
    if stem.endswith("e") and ending[0] in "aei":
        stem = stem[:-1]
    elif stem.endswith("y") and ending in ("s", "ed", "er", "ly", "ness", "ful") and stem[-2] not in "aeou":
        stem = stem[:-1] + "i"
    return stem + ending


def training_words(seed: int = 7) -> Iterator[str]:
    """Sentences: every stem some dozens of times, its forms less often, small words between, numbers."""
    rng = random.Random(seed)
    words = [word for stem in STEMS for word in [stem] * 12]
    words += [inflected(stem, ending) for stem in STEMS for ending in ENDINGS[:4] for _ in range(3)]
    words += [inflected(stem, ending) for stem in STEMS for ending in ENDINGS[4:]]
    words += [beginning + stem for stem in STEMS for beginning in BEGINNINGS]
    words += SMALL * 200 + [str(rng.randrange(10**digits)) for digits in (1, 2, 3, 4) for _ in range(400)]
    rng.shuffle(words)
    position = 0
    while position < len(words):
        length = rng.randint(6, 16)
        sentence = " ".join(words[position : position + length])
        position += length
        yield sentence[0].upper() + sentence[1:] + rng.choice((".", ".", ".", "?", "!", ":", ";", ",")) + "\n"
