//! Free lists under every interleaving that a scheduler finds, with a client that dies or stops at every access.

use crate::support::lists::{Fate, SCENARIOS, head_at};
use crate::support::{Bytes, assign, free_list, give, grant, key, open, take};
use farside_remote::arena::class::Class;
use farside_remote::arena::lists::{Empty, Supply};
use farside_remote::arena::reuse::Retirees;
use farside_remote::arena::segment::Use;
use farside_remote::arena::session::{Counters, SessionId, epoch_at, turn_at};
use farside_remote::arena::state::{Stage, State};
use farside_remote::arena::{Arena, SESSIONS_MAX, header};
use farside_remote::draws::Draws;
use farside_remote::op::ListId;
use farside_remote::{By, ChainBuf, Reply, Status, allocate, run};

const BY: By = By::itself(SessionId { slot: 1, number: 5 });

#[test]
fn no_buffer_is_held_twice_and_none_is_lost() {
    for scenario in SCENARIOS {
        let reused = scenario.explore(Fate::Lives, 1, 1500).reused.into_inner();
        println!("{}: 3000 schedules, {reused} buffers taken by the client that retired them", scenario.name);
        assert!(if scenario.reuses { reused > 1000 } else { reused == 0 });
    }
}

#[test]
fn a_death_at_any_access_loses_only_the_dead_clients_buffers() {
    for scenario in SCENARIOS {
        let (accesses, struck) = scenario.explore_all(Fate::Dies, 2, 15);
        println!("{}: died {struck} times, before each of {accesses} accesses", scenario.name);
        assert!(accesses > 20);
    }
}

#[test]
fn a_client_stopped_at_any_access_does_no_harm_when_it_continues() {
    for scenario in SCENARIOS {
        let (accesses, struck) = scenario.explore_all(Fate::Stops, 3, 15);
        println!("{}: stopped {struck} times, before each of {accesses} accesses", scenario.name);
        assert!(accesses > 20);
    }
}

#[test]
fn the_length_of_a_list_is_known_without_iterating() {
    let memory = Bytes::new(8 << 20);
    let class = Class::get(40).expect("a class");
    grant(&memory, 0, 1, Supply::Quota);
    let (mut held, mut random) = (Vec::new(), Draws(1));
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

/// A peer with the memory mapped may write any bytes at any address. The node must neither hang nor panic.
#[test]
fn damaged_memory_causes_neither_hangs_nor_panics() {
    let mut random = Draws(4);
    let mut seen = [0; Status::ALL.len()];
    for round in 0..6000 {
        let memory = Bytes::new(8 << 20);
        let class = Class::get(40).expect("a class");
        open(&memory, 1);
        (0..3).for_each(|segment| grant(&memory, segment, 1, Supply::Quota));
        // A segment has 15 buffers: 4 and 14 leave some of them, 15 uses the segment up, and 16 also needs the next
        // segment.
        let count = random.pick(&[4, 14, 15, 16]);
        let taken: Vec<u64> = (0..count).map(|_| take(&memory, 1, class, Supply::Quota, 5)).collect();
        let (arena, session) = (Arena::of(&memory), BY.retires);
        // The session has buffers on all of its lists, in most rounds.
        let Ok(()) = arena.set_reuse(1, random.once_in(8));
        let Ok(()) = arena.count_slot(session.slot);
        let filled = random.below(4);
        for retired in taken.iter().rev().take(filled as usize) {
            let Ok(_) = arena.retire(session, 1, *retired);
            let Ok(()) = arena.set_reuse(1, true);
            let Ok(_) = arena.reuse(BY, 1, class);
        }
        for _ in 0..1 + random.below(3) {
            let (at, bytes) = damage(&mut random, &taken, round % 2 == 0);
            memory.poke(at, &bytes);
        }
        // Each of the 24 ALLOCATEs may look at all slots, to advance the epoch.
        memory.limit_words(20_000 + 24 * 2 * u64::from(SESSIONS_MAX));
        let Ok(()) = arena.settle(1, class);
        let mut buf = ChainBuf::new();
        let mut reply = Reply::new();
        for list in [40, 40, 39, 40, 40, 40, 40, 40, 40, 40, 40, 40] {
            let mut chain = buf.begin(key(1));
            let _ = chain.also(allocate(ListId(list), [b"item", b"", b""]));
            let _ = chain.also(allocate(ListId(list), [b"item", b"", b""]).from_reserve());
            let Ok(()) = run(&memory, BY, chain.view(), &mut reply);
            let allocated = reply.output(0).try_into().map_or(0, u64::from_le_bytes);
            let Ok(_) = arena.retire(session, 1, allocated);
            seen[reply.verdict() as usize] += 1;
        }
        if let Ok(Some((_, buffer))) = arena.buffer_at(taken[2]) {
            let Ok(()) = arena.give(1, &buffer);
            let Ok(_) = arena.retire(SessionId { slot: 3, number: 5 }, 1, buffer.at);
        }
        for list in Retirees::ALL {
            let Ok(_) = arena.next_reused(session, 1, class, None);
            let Ok(_) = arena.take_retired(session.slot, list);
        }
        grant(&memory, 4, 1, Supply::Quota);
        let Ok(_) = arena.list_len(1, class);
        let Ok(_) = arena.granted(1, Supply::Quota);
        for (segment, ordinal) in (0..5).flat_map(|segment| (0..17).map(move |ordinal| (segment, ordinal))) {
            let Ok(_) = arena.buffer_state(segment, ordinal);
        }
    }
    println!("outcomes of chains on damaged memory: {seen:?}");
    assert!(seen[Status::Ok as usize] > 0 && seen[Status::NotReady as usize] > 0);
}

const REGION_AT: u64 = 4096 * 2;
/// Offsets in the region's record: the two granted lists, the free list of class 40, its two current segments, and the
/// number of its freed buffers.
const HEADS: [u64; 6] = [64, 80, 128 + 40 * 64, 128 + 40 * 64 + 16, 128 + 40 * 64 + 32, 128 + 40 * 64 + 48];
/// The epoch, the number of slots, the session's turn and its epoch, and whether sessions reuse buffers in the region.
const EPOCHS: [u64; 5] =
    [header::EPOCH_AT, header::SLOTS_AT, turn_at(BY.retires.slot), epoch_at(BY.retires.slot), REGION_AT + 8];
const SEGMENTS_AT: u64 = 4096 + (1 << 20) + (256 << 10) + (512 << 10);

/// Address of a segment's entry in the segment table.
const fn entry_at(segment: u64) -> u64 {
    SEGMENTS_AT + segment * 32
}

/// Draws a peer's write: an address, and the bytes to write there (random or plausible).
fn damage(random: &mut Draws, taken: &[u64], plausible: bool) -> (u64, Vec<u8>) {
    let links = [0, 0x10, 0x20, 0x30, 0x40, 0x70, 0xfff0, taken[0], taken[1], taken[1] + 64, 4096];
    let link = |random: &mut Draws| random.pick(&links) | random.pick(&[0, 0, 0, 1, 2, 3]);
    let mut word = random.bytes(16);
    let kind = random.below(6);
    let at = match kind {
        0 => REGION_AT + random.pick(&HEADS),
        1 => entry_at(random.below(4)),
        2 => entry_at(random.below(4)) + 16,
        // The lists of retired buffers, and the words that say when they are reused.
        3 => head_at(BY.retires.slot, random.pick(&Retirees::ALL)),
        4 => random.pick(&EPOCHS),
        // The state of one of a segment's first buffers.
        _ => (random.pick(taken) & !((1 << 20) - 1)) + random.below(4) * 16,
    };
    if plausible {
        match kind {
            // A link to a segment or a buffer, with any phase and any session.
            0 => {
                word[..6].copy_from_slice(&link(random).to_le_bytes()[..6]);
                word[12..].copy_from_slice(&(random.below(80) as u32).to_le_bytes());
            }
            1 => {
                word[..4].copy_from_slice(&[
                    random.pick(&[0, 1, 1, 1, 2]),
                    0,
                    random.pick(&[39, 40, 40, 0xfd, 0xfe, 0xff]),
                    random.pick(&[0, 0, 1, 2]),
                ]);
                word[4..8].copy_from_slice(&random.pick(&[0, 3, 14, 15, 16, u32::MAX]).to_le_bytes());
            }
            2 => word = link(random).to_le_bytes().to_vec(),
            // A link to a buffer, with any mark.
            3 => {
                word[..6].copy_from_slice(&link(random).to_le_bytes()[..6]);
                word[6..8].copy_from_slice(&random.pick(&[0, 1, 3, 4, u16::MAX]).to_le_bytes());
            }
            4 => word = random.pick(&[0, 1, 2, u64::from(SESSIONS_MAX), u64::MAX]).to_le_bytes().to_vec(),
            _ => {
                word[..6].copy_from_slice(&link(random).to_le_bytes()[..6]);
                word[6..8].copy_from_slice(&[random.below(5) as u8, 0]);
            }
        }
    }
    (at, word)
}

/// A granted list's head names a used-up segment again and again, or a segment of another region.
#[test]
fn a_granted_list_that_names_a_wrong_segment_is_damaged() {
    let class = Class::get(40).expect("a class");
    let granted_at = REGION_AT + HEADS[0];
    for (named, phase) in [(0u64, 0u64), (0, 1), (1, 0), (1, 1)] {
        let memory = Bytes::new(8 << 20);
        grant(&memory, 0, 1, Supply::Quota);
        assign(&memory, 1, 2, Use::Granted);
        grant(&memory, 2, 1, Supply::Reserve);
        for _ in 0..class.count {
            take(&memory, 1, class, Supply::Quota, 5);
        }
        let link = (named + 1) << 4;
        memory.poke(entry_at(named) + 16, &link.to_le_bytes());
        let mut head = memory.peek(granted_at, 16);
        head[..6].copy_from_slice(&(link | phase).to_le_bytes()[..6]);
        head[12..].copy_from_slice(&40u32.to_le_bytes());
        memory.poke(granted_at, &head);
        let entry = memory.peek(entry_at(named), 16);
        memory.limit_words(1000);
        let arena = Arena::of(&memory);
        let Ok(taken) = arena.take(1, class, Supply::Quota, 5);
        assert_eq!(taken, Err(Empty::Damaged), "segment {named} in phase {phase}");
        assert_eq!(memory.peek(entry_at(named), 16), entry, "segment {named} keeps its owner");
        let Ok(taken) = arena.take(1, class, Supply::Reserve, 5);
        assert!(taken.is_ok(), "the reserve has a separate list");
    }
}

/// A link has 16 spare bits, and its low 4 bits would encode a phase in a list's head. None of these 20 bits is
/// trusted.
#[test]
fn a_damaged_link_cannot_start_a_step_of_a_list() {
    let class = Class::get(40).expect("a class");
    let memory = Bytes::new(8 << 20);
    grant(&memory, 0, 1, Supply::Quota);
    let at = take(&memory, 1, class, Supply::Quota, 5);
    let (arena, head_at) = (Arena::of(&memory), REGION_AT + HEADS[2]);
    let Ok(Some((_, buffer))) = arena.buffer_at(at) else { panic!("it is a buffer") };
    let Ok(live) = arena.state(&buffer);
    let Ok(true) = arena.exchange_state(&buffer, live, State { next: at | 1, ..live }) else {
        panic!("no other client runs")
    };
    memory.poke(head_at, &(at | 1).to_le_bytes());
    memory.limit_words(1000);
    let Ok(_) = arena.take(1, class, Supply::Quota, 5);
}

/// A client frees a buffer that it holds, but a peer has overwritten the buffer's state.
#[test]
fn a_buffer_whose_state_is_free_or_unused_is_not_given() {
    let class = Class::get(40).expect("a class");
    for stage in [Stage::Free, Stage::Unused] {
        let memory = Bytes::new(8 << 20);
        grant(&memory, 0, 1, Supply::Quota);
        let at = take(&memory, 1, class, Supply::Quota, 5);
        let arena = Arena::of(&memory);
        let Ok(Some((_, buffer))) = arena.buffer_at(at) else { panic!("it is a buffer") };
        let Ok(live) = arena.state(&buffer);
        let Ok(_changed) = arena.exchange_state(&buffer, live, State { stage, ..live });
        let Ok(()) = arena.give(1, &buffer);
        assert!(free_list(&memory, 1, class).is_empty());
    }
}

/// The counters of sessions and lists are in memory that peers can write.
#[test]
fn counters_that_a_peer_set_to_the_maximum_wrap() {
    let most = Counters::from_bytes(&[0xff; Counters::SIZE]);
    let mut sum = most;
    sum.add(&most);
    assert_eq!(sum.chains, u64::MAX - 1);

    let class = Class::get(40).expect("a class");
    let memory = Bytes::new(8 << 20);
    open(&memory, 1);
    grant(&memory, 0, 1, Supply::Quota);
    let taken = [(); 2].map(|()| take(&memory, 1, class, Supply::Quota, 5));
    let (arena, session) = (Arena::of(&memory), SessionId { slot: 0, number: 5 });
    memory.poke(head_at(0, Retirees::Node) + 8, &[0xff; 8]);
    let Ok(retired) = arena.retire(session, 1, taken[0]);
    let Ok(first) = arena.take_retired(0, Retirees::Node);
    assert!(retired == Some(Retirees::Node) && first == taken[0]);
    memory.poke(REGION_AT + HEADS[5], &[0xff; 8]);
    give(&memory, taken[1]);
    memory.poke(REGION_AT + HEADS[5], &[0xff; 8]);
    let Ok(len) = arena.list_len(1, class);
    assert!(len > 0);
}
