//! Sets of worlds, from small to large. The sets that `all` makes have every order of the clients' clocks, and every
//! client that writes is recovered in turn.

use super::rules::Rules;
use super::world::{Lane, Transaction, World, each, lane, reads, single_reads, successor, updates, writes};

/// Keys a and b at one shard.
const ONE_SHARD: [usize; 2] = [0, 0];
/// Keys a and b at two shards.
const TWO_SHARDS: [usize; 2] = [0, 1];
/// Keys a, b and c at three shards.
const THREE_SHARDS: [usize; 3] = [0, 1, 2];

fn world(shards: &[usize], lanes: Vec<Lane>) -> World {
    World::new(Rules::DECIDED, shards, lanes)
}

/// Returns the transactions with every order of clocks from 1 on.
fn clocked(transactions: &[Transaction]) -> Vec<Vec<Transaction>> {
    let mut orders = vec![Vec::new()];
    for count in 0..transactions.len() as u8 {
        let longer = |order: Vec<u8>| {
            (0..=order.len()).map(move |at| [&order[..at], &[count + 1], &order[at..]].concat())
        };
        orders = orders.into_iter().flat_map(longer).collect();
    }
    let with = |clocks: Vec<u8>| {
        transactions.iter().zip(clocks).map(|(transaction, clock)| transaction.clone().at(clock)).collect()
    };
    orders.into_iter().map(with).collect()
}

/// Returns the world in which nobody dies, and for each client that writes the world in which it is recovered by
/// `recoverers` recoverers.
fn with_victims(world: &World, recoverers: usize) -> Vec<World> {
    let victims = world.lanes.iter().filter(|lane| lane.succeeds.is_none());
    let victims = victims.filter(|lane| lane.transactions.iter().any(|of| !of.writes.is_empty()));
    let mut clients: Vec<usize> = victims.map(|lane| lane.client).collect();
    clients.dedup();
    clients.into_iter().map(|client| world.clone().recovering(&vec![client; recoverers])).collect()
}

fn all(shards: &[usize], transactions: &[Transaction], recoverers: usize) -> Vec<World> {
    let of = |order: Vec<Transaction>| with_victims(&world(shards, each(order)), recoverers);
    clocked(transactions).into_iter().flat_map(of).collect()
}

/// Two clients with one transaction each, over one or two shards.
pub fn pairs(recoverers: usize) -> Vec<World> {
    let reads_a_writes_b = || reads("a").and_writes("b");
    let reads_b_writes_a = || reads("b").and_writes("a");
    [
        all(&[0], &[writes("a"), writes("a")], recoverers),
        all(&[0], &[updates("a"), updates("a")], recoverers),
        all(&TWO_SHARDS, &[writes("ab"), writes("a")], recoverers),
        all(&TWO_SHARDS, &[writes("ab"), updates("a")], recoverers),
        all(&ONE_SHARD, &[writes("ab"), updates("ab")], recoverers),
        all(&TWO_SHARDS, &[reads_a_writes_b(), reads_b_writes_a()], recoverers),
        all(&TWO_SHARDS, &[writes("ab"), reads("ab")], recoverers),
        all(&TWO_SHARDS, &[writes("ab"), single_reads("ab")], recoverers),
    ]
    .concat()
}

/// Larger pairs: both clients write at both shards.
pub fn wide_pairs(recoverers: usize) -> Vec<World> {
    [
        all(&TWO_SHARDS, &[writes("ab"), updates("ab")], recoverers),
        all(&TWO_SHARDS, &[updates("ab"), updates("ab")], recoverers),
        all(&TWO_SHARDS, &[writes("ab"), writes("ab")], recoverers),
    ]
    .concat()
}

/// Three clients with one transaction each, at one shard or with one transaction over two.
pub fn triples(recoverers: usize) -> Vec<World> {
    [
        all(&[0], &[writes("a"), writes("a"), writes("a")], recoverers),
        all(&[0], &[writes("a"), writes("a"), updates("a")], recoverers),
        all(&[0], &[updates("a"), updates("a"), updates("a")], recoverers),
        all(&ONE_SHARD, &[writes("a"), writes("ab"), updates("b")], recoverers),
        all(&TWO_SHARDS, &[writes("a"), writes("ab"), updates("b")], recoverers),
    ]
    .concat()
}

/// Larger triples.
pub fn wide_triples() -> Vec<World> {
    let reads_b_writes_both = || reads("b").and_writes("ab");
    [
        all(&TWO_SHARDS, &[writes("a"), reads_b_writes_both(), updates("b")], 1),
        all(&TWO_SHARDS, &[reads("ab"), writes("ab"), updates("a")], 1),
        all(&TWO_SHARDS, &[writes("ab"), updates("a"), single_reads("ab")], 1),
        all(&TWO_SHARDS, &[reads("a").and_writes("b"), reads("b").and_writes("a"), reads("ab")], 1),
        all(&TWO_SHARDS, &[writes("ab"), writes("ab"), writes("a")], 1),
        all(&TWO_SHARDS, &[writes("ab"), reads_b_writes_both(), reads("ab")], 1),
    ]
    .concat()
}

/// Two clients that are both recovered, each by one recoverer.
pub fn two_victims() -> Vec<World> {
    let pairs = [
        (&[0][..], vec![writes("a"), writes("a")]),
        (&[0], vec![updates("a"), updates("a")]),
        (&TWO_SHARDS, vec![writes("ab"), writes("a")]),
        (&TWO_SHARDS, vec![writes("ab"), updates("a")]),
        (&ONE_SHARD, vec![writes("ab"), writes("ab")]),
        (&TWO_SHARDS, vec![writes("ab"), writes("ab")]),
        (&[0], vec![writes("a"), writes("a"), updates("a")]),
    ];
    let of = |(shards, transactions): (&[usize], Vec<Transaction>)| -> Vec<World> {
        clocked(&transactions)
            .into_iter()
            .map(|order| world(shards, each(order)).recovering(&[0, 1]))
            .collect()
    };
    pairs.into_iter().flat_map(of).collect()
}

/// Four clients.
pub fn four() -> Vec<World> {
    let transactions = [writes("a").at(1), writes("a").at(2), writes("ab").at(3), updates("b").at(4)];
    vec![world(&TWO_SHARDS, each(transactions)).recovering(&[1])]
}

/// Clients that run two transactions one after the other, and reuse the entries of the first. The second begins while
/// the entries of the first are still being freed.
pub fn reuse() -> Vec<World> {
    let sequences = [
        (&[0][..], vec![writes("a").at(1), writes("a").at(2)], writes("a")),
        (&[0], vec![updates("a").at(1), updates("a").at(2)], updates("a")),
        (&ONE_SHARD, vec![writes("b").at(1), writes("a").at(2)], writes("a")),
        (&ONE_SHARD, vec![writes("b").at(1), writes("a").at(2)], updates("a")),
        (&ONE_SHARD, vec![writes("a").at(1), writes("b").at(2)], updates("ab")),
        (&TWO_SHARDS, vec![writes("ab").at(1), writes("a").at(2)], writes("a")),
        (&TWO_SHARDS, vec![writes("ab").at(1), updates("a").at(2)], updates("b")),
        (&TWO_SHARDS, vec![writes("a").at(1), writes("ab").at(2)], writes("b")),
        (&TWO_SHARDS, vec![updates("a").at(1), reads("a").and_writes("b").at(2)], updates("b")),
    ];
    let of = |(shards, first, other): (&[usize], Vec<Transaction>, Transaction)| -> Vec<World> {
        [1, 2, 3]
            .into_iter()
            .flat_map(|clock| {
                let lanes = vec![lane(0, first.clone()), lane(1, [other.clone().at(clock)])];
                with_victims(&world(shards, lanes), 1)
            })
            .collect()
    };
    sequences.into_iter().flat_map(of).collect()
}

/// A client that takes over the id and the entries of a recovered one, which a second, late recoverer still recovers.
pub fn successors(recoverers: usize) -> Vec<World> {
    let pairs = [
        (&[0][..], writes("a"), writes("a")),
        (&[0], updates("a"), updates("a")),
        (&ONE_SHARD, writes("ab"), writes("b")),
        (&TWO_SHARDS, writes("ab"), writes("a")),
        (&TWO_SHARDS, writes("ab"), updates("b")),
        (&TWO_SHARDS, writes("a"), writes("ab")),
        (&[0, 1, 0], writes("ab"), writes("c")),
    ];
    let of = |(shards, first, next): (&[usize], Transaction, Transaction)| {
        let lanes = vec![lane(0, [first]), successor(1, 0, [next])];
        [vec![0; recoverers], vec![0, 1]].map(|recovered| world(shards, lanes.clone()).recovering(&recovered))
    };
    pairs.into_iter().flat_map(of).collect()
}

/// A client that takes over an id, beside another client.
pub fn successors_beside() -> Vec<World> {
    let of = |other: Transaction| {
        let lanes = vec![lane(0, [writes("ab")]), successor(1, 0, [writes("a")]), lane(2, [other])];
        [1, 2].map(|recoverers| world(&ONE_SHARD, lanes.clone()).recovering(&vec![0; recoverers]))
    };
    [writes("a").at(1), updates("a").at(2), updates("b").at(1), reads("ab").at(1)]
        .into_iter()
        .flat_map(of)
        .collect()
}

/// Clients with two lanes, which one recoverer recovers, beside another client.
pub fn two_lanes() -> Vec<World> {
    let of = |shards: &[usize], [first, second, other]: [Transaction; 3]| {
        let lanes = vec![lane(0, [first]), lane(0, [second]), lane(1, [other])];
        [vec![0], vec![1], vec![0, 1]].map(|recovered| world(shards, lanes.clone()).recovering(&recovered))
    };
    [
        of(&[0], [writes("a").at(1), writes("a").at(3), writes("a").at(2)]),
        of(&[0], [writes("a").at(1), writes("a").at(2), writes("a").at(3)]),
        of(&[0], [writes("a").at(1), updates("a").at(3), updates("a").at(2)]),
        of(&ONE_SHARD, [writes("ab").at(1), writes("b").at(3), writes("ab").at(2)]),
        of(&ONE_SHARD, [writes("a").at(1), writes("b").at(3), writes("ab").at(2)]),
    ]
    .concat()
}

/// Sessions that break within a chain: the client gets no response.
pub fn breaking() -> Vec<World> {
    let sets = [
        (&[0][..], vec![writes("a"), writes("a")]),
        (&[0], vec![updates("a"), updates("a")]),
        (&TWO_SHARDS, vec![writes("ab"), writes("a")]),
        (&TWO_SHARDS, vec![writes("ab"), updates("a")]),
        (&ONE_SHARD, vec![writes("ab"), updates("ab")]),
        (&[0], vec![writes("a"), writes("a"), updates("a")]),
    ];
    let of = |(shards, transactions): (&[usize], Vec<Transaction>)| -> Vec<World> {
        let worlds = clocked(&transactions).into_iter().flat_map(|order| {
            let alive = world(shards, each(order));
            let dying = alive.clone().recovering(&[0]);
            [alive.breaking(2), dying.breaking(1)]
        });
        worlds.collect()
    };
    sets.into_iter().flat_map(of).collect()
}

/// Three keys at three shards: each transaction has a shard in common with each other one, or one has all three.
pub fn three_shards() -> Vec<World> {
    let clock = |transactions: Vec<Transaction>, clocks: [u8; 3]| -> Vec<Transaction> {
        transactions.into_iter().zip(clocks).map(|(transaction, clock)| transaction.at(clock)).collect()
    };
    let ring = || vec![writes("ab"), writes("bc"), writes("ac")];
    [
        world(&THREE_SHARDS, each(vec![writes("abc").at(1), updates("a").at(2)])).recovering(&[0]),
        world(&THREE_SHARDS, each(vec![writes("abc").at(2), updates("c").at(1)])).recovering(&[0]),
        world(&THREE_SHARDS, each(vec![reads("a").and_writes("abc").at(1), writes("b").at(2)]))
            .recovering(&[0]),
        world(&THREE_SHARDS, each(vec![writes("abc").at(1), reads("abc").at(2)])).recovering(&[0]),
        world(&THREE_SHARDS, each(clock(ring(), [1, 2, 3]))),
        world(&THREE_SHARDS, each(clock(ring(), [3, 1, 2]))),
    ]
    .to_vec()
}

/// Three keys at three shards, with entries that are reused there.
pub fn three_shards_reuse() -> Vec<World> {
    let lanes = |first: Transaction, second: Transaction, other: Transaction| {
        vec![lane(0, [first.at(1), second.at(2)]), lane(1, [other])]
    };
    [
        world(&THREE_SHARDS, lanes(writes("abc"), writes("b"), writes("b").at(1))).recovering(&[0]),
        world(&THREE_SHARDS, lanes(writes("abc"), updates("c"), writes("b").at(3))).recovering(&[0]),
        world(&THREE_SHARDS, lanes(writes("ab"), writes("bc"), writes("b").at(3))).recovering(&[0]),
        world(&THREE_SHARDS, lanes(writes("ab"), writes("bc"), updates("b").at(1))).recovering(&[1]),
    ]
    .to_vec()
}

/// Worlds with two kinds of trouble: entries that are reused while a session breaks, clients with two lanes and two
/// recoverers, and ids that are taken over from a client with two recoverers by a client that is recovered, too, and
/// then by a third one.
pub fn mixed() -> Vec<World> {
    let broken = reuse().into_iter().map(|world| world.breaking(1));
    let lanes = two_lanes().into_iter().filter(|world| world.recovered == [0]);
    let lanes = lanes.map(|world| world.recovering(&[0, 0]));
    let ids = successors(2).into_iter().filter(|world| world.recovered == [0, 0]);
    let ids = ids.map(|world| world.recovering(&[0, 0, 1]));
    let twice = |shards: &[usize], [first, second, third]: [Transaction; 3]| {
        let lanes = vec![lane(0, [first]), successor(1, 0, [second]), successor(2, 1, [third])];
        world(shards, lanes).recovering(&[0, 0, 1])
    };
    let twice = [
        twice(&[0], [writes("a"), writes("a"), updates("a")]),
        twice(&TWO_SHARDS, [writes("ab"), writes("a"), updates("b")]),
        twice(&[0, 1, 0], [writes("ab"), writes("c"), updates("a")]),
    ];
    broken.chain(lanes).chain(ids).chain(twice).collect()
}

/// The ring of three transactions over three shards, with recovery.
pub fn three_shards_ring() -> Vec<World> {
    all(&THREE_SHARDS, &[writes("ab"), writes("bc"), writes("ac")], 1)
        .into_iter()
        .chain(all(&THREE_SHARDS, &[updates("ab"), updates("bc"), updates("ac")], 1))
        .chain(all(&THREE_SHARDS, &[writes("abc"), writes("abc")], 1))
        .collect()
}
