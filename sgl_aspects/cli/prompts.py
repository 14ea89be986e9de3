"""The demo's eight prompts: short and long, and within what a model of 135 million parameters can do."""

from __future__ import annotations

_REVIEW = """\
We had booked a table for six, and the waiter had kept the best one by the window for us. The soup was \
hot, the bread was fresh, and the fish was the best that I have eaten in years. When my daughter spilled \
her juice, someone brought a new glass before we could ask. We will come back next month."""

_BICYCLE = """\
The bicycle is the most efficient machine ever made to turn human strength into movement. A person on a \
bicycle uses about one fifth of the energy that the same person needs to walk the same distance, and \
travels three to four times faster. The first bicycles, built in the early nineteenth century, had no \
pedals: riders pushed themselves along with their feet. Pedals were added in the eighteen sixties, and the \
chain drive, which lets the rider sit between two wheels of equal size, followed some twenty years later. \
Air-filled tyres made the ride comfortable, and the bicycle became cheap enough for ordinary workers. It \
changed how people lived. Workers could live further from the factory, villages came closer together, and \
women, who had been expected to travel in company, could go where they liked on their own. Roads were \
paved because cyclists asked for it, long before there were cars to drive on them. Today there are about a \
billion bicycles in the world, twice as many as cars, and cities that had given their streets to cars are \
building paths for bicycles again.

The machine itself has hardly changed in a hundred years. Two triangles of steel tube carry the rider, a \
chain turns the rear wheel, and cables pull the brakes. What has changed is the material: frames are made \
of aluminium and carbon fibre, and the lightest weigh less than a kilogram. Electric motors have brought a \
second wave. A small motor in the hub or at the pedals doubles the strength of the rider, so that hills, \
headwinds and heavy loads are no longer a reason to take the car. Parents carry their children, and firms \
deliver parcels, on cargo bicycles that need no parking space and no fuel. Doctors point out that half an \
hour of cycling a day lowers the risk of heart disease by about a third, and city planners that one lane \
can move seven times as many people on bicycles as in cars."""

PROMPTS: tuple[str, ...] = (
    "What is the capital of France?",
    "Name three fruits.",
    "Explain photosynthesis in two sentences.",
    "Write a two-line poem about the moon.",
    "Rewrite in formal English: gonna be late, sorry, the bus didn't come.",
    "Give me three tips for a good night's sleep.",
    f"Is this review positive or negative? Answer with one word.\n\n{_REVIEW}",
    f"What is this text about? Answer in one sentence.\n\n{_BICYCLE}",
)
