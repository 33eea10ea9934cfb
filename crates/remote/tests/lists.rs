//! Free lists under every interleaving that a scheduler finds, with death and stoppage at every access.

mod support;

use farside_remote::arena::Arena;
use farside_remote::arena::class::Class;
use farside_remote::arena::lists::Supply;
use farside_remote::op::ListId;
use farside_remote::{ChainBuf, Reply, Status, allocate, run};
use support::lists::{Fate, SCENARIOS};
use support::{Bytes, Random, free_list, give, grant, key, open, take};

#[test]
fn no_buffer_is_ever_held_by_two_and_none_is_lost() {
    for scenario in SCENARIOS {
        scenario.explore(Fate::Lives, 1, 1500);
        println!("{}: 3000 schedules", scenario.name);
    }
}

#[test]
fn death_at_any_access_loses_no_buffer_but_those_of_the_dead() {
    for scenario in SCENARIOS {
        let (accesses, struck) = scenario.explore_all(Fate::Dies, 2, 40);
        println!("{}: died {struck} times, before each of {accesses} accesses", scenario.name);
        assert!(accesses > 20);
    }
}

#[test]
fn one_who_was_stopped_anywhere_and_goes_on_much_later_does_no_harm() {
    for scenario in SCENARIOS {
        let (accesses, struck) = scenario.explore_all(Fate::Stops, 3, 40);
        println!("{}: stopped {struck} times, before each of {accesses} accesses", scenario.name);
        assert!(accesses > 20);
    }
}

#[test]
fn the_length_of_a_list_is_known_without_walking_it() {
    let memory = Bytes::new(8 << 20);
    let class = Class::get(40).expect("a class");
    grant(&memory, 0, 1, Supply::Quota);
    let (mut held, mut random) = (Vec::new(), Random::new(1));
    for _ in 0..500 {
        if random.once_in(2) && held.len() < 15 {
            held.push(take(&memory, 1, class, Supply::Quota, 5));
        } else if !held.is_empty() {
            let next = random.below(held.len() as u64) as usize;
            give(&memory, held.swap_remove(next));
        }
        let Ok(known) = Arena::of(&memory).list_len(1, class);
        assert_eq!(known, free_list(&memory, 1, class).len() as u64);
    }
}

/// A peer on shared memory may write anything anywhere; the rest of the node must go on.
#[test]
fn a_damaged_head_neither_hangs_nor_panics_whoever_meets_it() {
    const REGION_AT: u64 = 4096 * 2;
    /// The granted lists, the class's free list, and its current segments.
    const HEADS: [u64; 5] = [64, 80, 128 + 40 * 64, 128 + 40 * 64 + 16, 128 + 40 * 64 + 32];
    let mut random = Random::new(4);
    let mut seen = [0; Status::ALL.len()];
    for round in 0..4000 {
        let memory = Bytes::new(8 << 20);
        let class = Class::get(40).expect("a class");
        open(&memory, 1);
        (0..3).for_each(|segment| grant(&memory, segment, 1, Supply::Quota));
        let taken = [(); 4].map(|()| take(&memory, 1, class, Supply::Quota, 5));
        let damaged = REGION_AT + random.pick(&HEADS);
        let mut word = random.bytes(16);
        if round % 2 == 0 {
            // Something that names a segment or a buffer, in the middle of a step, for whomever.
            let first = random.pick(&[0x10, 0x20, 0x70, 0xfff0, taken[0], taken[1] + 64, 4096]);
            word[..6].copy_from_slice(&(first | random.below(4)).to_le_bytes()[..6]);
            word[12..].copy_from_slice(&(random.below(80) as u32).to_le_bytes());
        }
        memory.poke(damaged, &word);
        let arena = Arena::of(&memory);
        let Ok(()) = arena.settle(1, class);
        let mut buf = ChainBuf::new();
        let mut reply = Reply::new();
        for list in [40, 40, 39] {
            let mut chain = buf.begin(key(1));
            let _ = chain.also(allocate(ListId(list), [b"item", b"", b""]));
            let _ = chain.also(allocate(ListId(list), [b"item", b"", b""]).from_reserve());
            let Ok(()) = run(&memory, 5, chain.view(), &mut reply);
            seen[reply.verdict() as usize] += 1;
        }
        let Ok(Some((_, buffer))) = arena.buffer_at(taken[2]) else { panic!("it is a buffer") };
        let Ok(()) = arena.give(1, &buffer);
        grant(&memory, 4, 1, Supply::Quota);
        let Ok(_) = arena.list_len(1, class);
    }
    println!("chains met damage and came to: {seen:?}");
    assert!(seen[Status::Ok as usize] > 0 && seen[Status::NotReady as usize] > 0);
}
