"""The object kinds: name, category and the emoji of the sprite.

The order is part of the world: the index of a kind is its index in the sprite atlas.
"""

from __future__ import annotations

from dataclasses import dataclass

_TABLE = """
animal: dog 🐕, cat 🐈, horse 🐎, cow 🐄, pig 🐖, sheep 🐑, camel 🐫, elephant 🐘, rhino 🦏, giraffe 🦒, zebra 🦓
animal: gorilla 🦍, kangaroo 🦘, rabbit 🐇, squirrel 🐿, hedgehog 🦔, bat 🦇, sloth 🦥, panda 🐼, koala 🐨, fox 🦊
animal: lion 🦁, tiger 🐅, rooster 🐓, chick 🐥, duck 🦆, swan 🦢, owl 🦉, flamingo 🦩, peacock 🦚, parrot 🦜
animal: penguin 🐧, dove 🕊, turkey 🦃, frog 🐸, crocodile 🐊, turtle 🐢, lizard 🦎, snake 🐍, dinosaur 🦖, whale 🐋
animal: dolphin 🐬, fish 🐟, blowfish 🐡, octopus 🐙, crab 🦀, lobster 🦞, squid 🦑, snail 🐌, butterfly 🦋
animal: caterpillar 🐛, ant 🐜, bee 🐝, ladybug 🐞, spider 🕷, scorpion 🦂, shell 🐚
fruit: apple 🍎, pear 🍐, lemon 🍋, banana 🍌, watermelon 🍉, strawberry 🍓, melon 🍈, cherry 🍒, peach 🍑
fruit: pineapple 🍍, coconut 🥥, kiwi 🥝, tomato 🍅, avocado 🥑, eggplant 🍆, carrot 🥕, pepper 🌶
fruit: mushroom 🍄, peanut 🥜, onion 🧅
food: croissant 🥐, baguette 🥖, pretzel 🥨, bagel 🥯, waffle 🧇, cheese 🧀, hamburger 🍔, pizza 🍕, hotdog 🌭
food: sandwich 🥪, taco 🌮, egg 🥚, cookie 🍪, doughnut 🍩, cake 🎂, cupcake 🧁, chocolate 🍫, candy 🍬
food: lollipop 🍭, teacup 🍵, teapot 🫖
vehicle: car 🚗, taxi 🚕, bus 🚌, ambulance 🚑, truck 🚚, tractor 🚜, motorcycle 🏍, bicycle 🚲, scooter 🛴
vehicle: helicopter 🚁, airplane ✈, rocket 🚀, sailboat ⛵, ship 🚢, canoe 🛶, anchor ⚓, skateboard 🛹, parachute 🪂
sport: football ⚽, basketball 🏀, baseball ⚾, volleyball 🏐, glove 🥊, trophy 🏆, medal 🏅, target 🎯, sled 🛷
sport: skate ⛸, paddle 🏓, trumpet 🎺
tool: hammer 🔨, axe 🪓, saw 🪚, wrench 🔧, gear ⚙, magnet 🧲, ladder 🪜, microscope 🔬, telescope 🔭, syringe 💉
tool: key 🔑, lock 🔒, broom 🧹, basket 🧺, bucket 🪣, sponge 🧽, pencil ✏, candle 🕯, bulb 💡
tool: battery 🔋, bell 🔔
object: clock ⏰, hourglass ⌛, watch ⌚, telephone ☎, camera 📷, television 📺, radio 📻, laptop 💻, printer 🖨
object: microphone 🎤, guitar 🎸, violin 🎻, saxophone 🎷, drum 🥁, accordion 🪗, book 📕, newspaper 📰, envelope ✉
object: gift 🎁, balloon 🎈, teddy 🧸, puzzle 🧩, dice 🎲, crown 👑, ring 💍, gem 💎, umbrella ☂, chair 🪑, door 🚪
object: mirror 🪞, bathtub 🛁, bone 🦴, tooth 🦷, robot 🤖, ghost 👻, pumpkin 🎃, suitcase 🧳, backpack 🎒
object: handbag 👜, hat 🎩, cap 🧢, boot 🥾, sandal 👡, dress 👗, shirt 👕, scarf 🧣, cart 🛒, bomb 💣
object: shield 🛡, sword 🗡, map 🗺, compass 🧭, globe 🌍
nature: tree 🌳, palm 🌴, cactus 🌵, sunflower 🌻, tulip 🌷, rose 🌹, leaf 🍁, clover 🍀, sun ☀, moon 🌙, star ⭐
nature: cloud ☁, rainbow 🌈, snowflake ❄, snowman ⛄, flame 🔥, drop 💧, wave 🌊, volcano 🌋, tent ⛺, house 🏠
nature: castle 🏰, fountain ⛲, hut 🛖, rock 🪨, log 🪵, feather 🪶
"""


@dataclass(frozen=True)
class ObjectKind:
    """One object kind.

    Attributes:
        name: Name in the singular, one lower-case word.
        category: Category, which selects the verbs of descriptions.
        emoji: Character that the sprite is rendered from.
    """

    name: str
    category: str
    emoji: str


def _parse_table() -> tuple[ObjectKind, ...]:
    kinds = []
    for line in _TABLE.strip().splitlines():
        category, entries = line.split(": ")
        for entry in entries.split(", "):
            name, emoji = entry.split(" ")
            kinds.append(ObjectKind(name, category, emoji))
    return tuple(kinds)


OBJECT_KINDS = _parse_table()
"""All object kinds; elsewhere a kind is its index in this tuple."""
