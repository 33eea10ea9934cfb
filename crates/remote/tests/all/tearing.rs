//! Chains interleaved with other clients' accesses: which reads may be torn, which reads may not, and that replay is
//! sound.

use crate::support::tearing::{Access, Tearing};
use crate::support::{Bytes, assign, free_list, give, grant, key, open, revoke, take};
use farside_remote::arena::Arena;
use farside_remote::arena::class::Class;
use farside_remote::arena::lists::Supply;
use farside_remote::arena::reuse::Retirees;
use farside_remote::arena::segment::Use;
use farside_remote::arena::session::SessionId;
use farside_remote::arena::state::Stage;
use farside_remote::draws::Draws;
use farside_remote::op::{ListId, Op, cas_with, write_from};
use farside_remote::{Addr, BoundedPtr, By, Chain, ChainBuf, Mode, Reply, Status};
use farside_remote::{allocate, cas, cas_from, fetch_add, read, retire, run, write};
use std::collections::BTreeSet;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

const OWNER: u32 = 5;
const BY: By = By::itself(SessionId { slot: 1, number: OWNER });
const CLASS: u8 = 4;
const LIST: ListId = ListId(CLASS as u32);

fn class() -> &'static Class {
    Class::get(CLASS).expect("a class")
}

/// A memory with a table and buffers of region 1, and the address of the table.
fn node() -> (Bytes, u64) {
    let memory = Bytes::new(8 << 20);
    open(&memory, 1);
    assign(&memory, 0, 1, Use::Table);
    grant(&memory, 1, 1, Supply::Quota);
    let at = Arena::of(&memory).geometry().segment_at(0);
    (memory, at)
}

/// Runs the chain that `build` makes, in an order that `seed` determines. Calls `between` between the chain's accesses.
fn torn<'a>(
    memory: &Bytes,
    seed: u64,
    buf: &'a mut ChainBuf,
    build: impl FnOnce(&mut Chain<'a>),
    between: impl FnMut(&Bytes, usize),
) -> (Reply, Vec<Access>) {
    let mut chain = buf.begin(key(1));
    build(&mut chain);
    let mut reply = Reply::new();
    let accesses = Tearing::new(memory, seed, between).run(BY, chain.view(), &mut reply);
    (reply, accesses)
}

/// Fills `len` bytes with the next version number.
fn rewrite(memory: &Bytes, at: u64, len: usize, version: &mut u8) {
    *version += 1;
    memory.poke(at, &vec![*version; len]);
}

/// Like [`torn`], but between accesses the `len` bytes at `at` are rewritten with a probability of 1 in `once_in`.
fn torn_by<'a>(
    (at, len, once_in): (u64, usize, u64),
    memory: &Bytes,
    seed: u64,
    buf: &'a mut ChainBuf,
    build: impl FnOnce(&mut Chain<'a>),
) -> (Reply, Vec<Access>) {
    let (mut version, mut random) = (0, Draws(seed));
    rewrite(memory, at, len, &mut version);
    torn(memory, seed, buf, build, |memory, _| {
        if random.once_in(once_in) {
            rewrite(memory, at, len, &mut version);
        }
    })
}

/// Number of different version numbers among the bytes.
fn versions(bytes: &[u8]) -> usize {
    bytes.iter().collect::<BTreeSet<_>>().len()
}

#[test]
fn a_long_read_may_be_torn_but_never_within_an_aligned_unit() {
    let (memory, table) = node();
    let mut torn_reads = 0;
    for seed in 0..200 {
        let mut buf = ChainBuf::new();
        let at = Addr::new(table);
        let (reply, _) = torn_by((table, 128, 2), &memory, seed, &mut buf, |c| also(c, read(at, 128)));
        assert_eq!(reply.verdict(), Status::Ok);
        let bytes = reply.output(0);
        assert!(bytes.chunks(16).all(|unit| versions(unit) == 1), "seed {seed}: a unit was torn");
        torn_reads += u32::from(versions(bytes) > 1);
    }
    println!("{torn_reads} of 200 reads of 128 bytes were torn");
    assert!(torn_reads > 20, "this memory does not tear");
}

#[test]
fn a_16_byte_read_is_torn_only_if_it_is_unaligned() {
    let (memory, table) = node();
    let mut torn_reads = 0;
    for seed in 0..200 {
        for (offset, aligned) in [(0, true), (48, true), (56, false)] {
            let mut buf = ChainBuf::new();
            let at = Addr::new(table + offset);
            let (reply, accesses) =
                torn_by((table, 128, 2), &memory, seed, &mut buf, |c| also(c, read(at, 16)));
            assert!(!aligned || versions(reply.output(0)) == 1, "seed {seed}: a slot was torn");
            assert_eq!(aligned, accesses.iter().any(|access| matches!(access, Access::Load { .. })));
            torn_reads += u32::from(versions(reply.output(0)) > 1);
        }
    }
    println!("{torn_reads} of 200 reads across two lines were torn");
    assert!(torn_reads > 20, "this memory does not tear");
}

#[test]
fn a_copy_within_the_node_never_tears_an_aligned_word() {
    let (memory, table) = node();
    let to = table + 8192;
    for seed in 0..100 {
        for offset in [0, 8, 1, 15, 16, 31, 48] {
            for redirected in [false, true] {
                let mut buf = ChainBuf::new();
                let (from, to) = (Addr::new(table + offset), Addr::new(to + offset));
                let build = |c: &mut Chain<'_>| {
                    if redirected {
                        also(c, read(from, 1500).redirect(to));
                    } else {
                        also(c, write_from(to, from, 1500));
                    }
                };
                torn_by((table, 2048, 3), &memory, seed, &mut buf, build);
                let copied = memory.peek(table + 8192 + offset, 1500);
                let lead = (32 - offset as usize % 32) % 32;
                for word in copied[lead..].chunks_exact(32) {
                    assert_eq!(versions(word), 1, "seed {seed}, from {offset}: a wide word was torn");
                }
            }
        }
    }
}

#[test]
fn a_wide_word_is_compared_and_swapped_atomically() {
    let (memory, table) = node();
    let mut retries = 0;
    for seed in 0..200 {
        let mut buf = ChainBuf::new();
        // No version is 255, so the comparison always holds, and an exchange fails only after a concurrent write.
        let op = cas(Mode::Ne, Addr::new(table), &[255u8; 32], &[254u8; 32]);
        let (reply, accesses) = torn_by((table, 32, 2), &memory, seed, &mut buf, |c| also(c, op));
        assert_eq!(reply.verdict(), Status::Ok, "seed {seed}");
        assert_eq!(versions(reply.output(0)), 1, "seed {seed}: the old value was torn");
        assert_eq!(memory.peek(table, 32), [254; 32], "seed {seed}: no write follows the exchange");
        let exchanges = accesses.iter().filter(|access| matches!(access, Access::ExchangeWide { .. }));
        retries += exchanges.count() - 1;
    }
    println!("200 exchanges, {retries} retries");
    assert!(retries > 20);
}

#[test]
fn a_pointer_and_its_pointee_are_read_at_different_moments() {
    let (memory, table) = node();
    let (old, new) = (table + 4096, table + 8192);
    memory.poke(old, &[1; 64]);
    memory.poke(new, &[2; 64]);
    let mut seen = BTreeSet::new();
    for moment in 0..8 {
        memory.poke(table, &old.to_le_bytes());
        memory.poke(old, &[1; 64]);
        let move_away = |memory: &Bytes, done| {
            if done == moment {
                memory.poke(table, &new.to_le_bytes());
                memory.poke(old, &[9; 64]);
            }
        };
        let mut buf = ChainBuf::new();
        let op = read(Addr::new(table), 64).indirect();
        let (reply, _) = torn(&memory, moment as u64, &mut buf, |c| also(c, op), move_away);
        seen.insert(reply.output(0)[0]);
    }
    // The chain may see the new bytes, the old bytes, and the bytes of a buffer that was freed meanwhile.
    assert_eq!(seen, BTreeSet::from([1, 2, 9]));
}

#[test]
fn rights_are_read_once_per_chain_and_reach_at_each_access() {
    let (memory, table) = node();
    memory.poke(table + 64, &[3; 32]);
    let pointer = BoundedPtr { ptr: Addr::new(table + 64), bound: U32::new(32), tag: U32::ZERO };
    memory.poke(table, pointer.as_bytes());
    // The accesses: the key, the reach of the pointer, the pointer, the reach of the pointee, the pointee. The key is
    // read once, so a chain that was admitted continues after the key is revoked. An access also continues if the
    // region loses the bytes after their reach was read.
    let (ok, no) = (Status::Ok, Status::Access);
    let key_lost = [(no, 1), (ok, 5), (ok, 5), (ok, 5), (ok, 5)];
    let segment_lost = [(no, 2), (no, 2), (no, 4), (no, 4), (ok, 5)];
    let lose_key: fn(&Bytes) = |memory| revoke(memory, 1);
    let lose_segment: fn(&Bytes) = |memory| assign(memory, 0, 2, Use::Table);
    for (lose, expected) in [(lose_key, key_lost), (lose_segment, segment_lost)] {
        for (moment, expected) in expected.into_iter().enumerate() {
            let mut lost = false;
            let lose = |memory: &Bytes, done| {
                if done == moment && !std::mem::replace(&mut lost, true) {
                    lose(memory);
                }
            };
            let mut buf = ChainBuf::new();
            let op = read(Addr::new(table), 32).indirect().bounded();
            let (reply, accesses) = torn(&memory, 0, &mut buf, |c| also(c, op), lose);
            assert_eq!((reply.verdict(), accesses.len()), expected, "lost before access {moment}");
            open(&memory, 1);
            assign(&memory, 0, 1, Use::Table);
        }
    }
}

#[test]
fn a_replayed_chain_makes_each_access_once_with_the_same_result() {
    for seed in 0..20 {
        let (memory, table) = node();
        let (plain, _) = node();
        for memory in [&memory, &plain] {
            memory.poke(table, &Draws(seed).bytes(4096));
            let free = [(); 3].map(|()| take(memory, 1, class(), Supply::Quota, OWNER));
            free.into_iter().for_each(|at| give(memory, at));
            memory.poke(table + 1024, &(table + 2048).to_le_bytes());
        }
        let (one, large) = (U64::new(1), vec![7; 700]);
        let (item, swap) = ([5; 100], [9u8; 32]);
        fn build<'a>(
            c: &mut Chain<'a>,
            table: u64,
            one: &'a U64,
            large: &'a [u8],
            item: &'a [u8],
            swap: &'a [u8; 32],
        ) {
            let at = |offset| Addr::new(table + offset);
            also(c, fetch_add(at(8), one));
            then(c, allocate(LIST, [item, b"", b""]).redirect(Addr::scratch(0)));
            then(c, write(at(512), large));
            then(c, write_from(at(2000), at(16), 900));
            then(c, read(at(1024), 333).indirect());
            also(c, cas(Mode::Ge, at(32), &[0u8; 32], swap));
            also(c, cas(Mode::Ne, at(32), swap, swap));
            also(c, cas(Mode::Ge, at(80), &[0u8; 16], swap.first_chunk().expect("32 bytes")));
            then(c, allocate(LIST, [item, b"", b""]).redirect(Addr::scratch(8)));
            then(c, cas_from(at(96), one, Addr::scratch(8)).reclaiming(0));
            also(c, allocate(LIST, [item, b"", b""]).redirect(Addr::scratch(8)));
            then(c, cas_with::<U64>(Mode::Ne, at(104), Addr::scratch(8)).reclaiming(0));
            then(c, cas_with::<U64>(Mode::Ne, at(104), Addr::scratch(0)).reclaiming(0));
            also(c, read(Addr::scratch(0), 32));
            also(c, read(at(1024), 700).redirect(at(3000)));
        }
        let mut buf = ChainBuf::new();
        let mut chain = buf.begin(key(1));
        build(&mut chain, table, &one, &large, &item, &swap);
        let mut reply = Reply::new();
        let Ok(()) = run(&plain, BY, chain.view(), &mut reply);

        let (mut moments, mut last) = (Vec::new(), None);
        let count = |_: &Bytes, done| {
            if last != Some(done) {
                moments.push(done);
                last = Some(done);
            }
        };
        let mut replayed_buf = ChainBuf::new();
        let (replayed, accesses) =
            torn(&memory, seed, &mut replayed_buf, |c| build(c, table, &one, &large, &item, &swap), count);
        assert_eq!(replayed.as_bytes(), reply.as_bytes(), "seed {seed}");
        assert!(memory.all() == plain.all(), "seed {seed}: memory differs from that of a run without replay");
        // The accesses are in order and none occurs twice, although the chain was restarted many times.
        assert_eq!(moments, (0..accesses.len()).collect::<Vec<_>>());
        println!("{} accesses, the chain was started {} times", accesses.len(), accesses.len() + 1);
    }
}

#[test]
fn a_reused_reply_keeps_no_earlier_contents() {
    let (memory, table) = node();
    let mut buf = ChainBuf::new();
    let mut reply = Reply::new();
    let mut long = buf.begin(key(1));
    for _ in 0..20 {
        also(&mut long, read(Addr::new(table), 1000));
    }
    let Ok(()) = run(&memory, BY, long.view(), &mut reply);
    let mut short = buf.begin(key(1));
    also(&mut short, read(Addr::new(table), 3));
    Tearing::new(&memory, 0, |_: &Bytes, _| {}).run(BY, short.view(), &mut reply);
    let mut fresh = Reply::new();
    let Ok(()) = run(&memory, BY, short.view(), &mut fresh);
    assert_eq!(reply.as_bytes(), fresh.as_bytes());
}

/// The last chain of a PUT: installs a new buffer if the word at `slot` still points to `old`, and retires `garbage`.
fn put<'a>(c: &mut Chain<'a>, slot: Addr, old: &'a U64, garbage: &'a [Addr]) {
    also(c, allocate(LIST, [b"new", b"", b""]).redirect(Addr::scratch(0)));
    then(c, cas_from(slot, old, Addr::scratch(0)).reclaiming(0));
    then(c, retire(garbage));
}

/// The stage and the owner of the buffer at `at`.
fn state_of(memory: &Bytes, at: u64) -> (Stage, u32) {
    let arena = Arena::of(memory);
    let Ok(Some((_, buffer))) = arena.buffer_at(at) else { panic!("{at:#x} is no buffer") };
    let Ok(state) = arena.state(&buffer);
    (state.stage, state.owner)
}

/// Takes all buffers off the session's retired list, and returns their addresses.
fn retired(memory: &Bytes) -> BTreeSet<u64> {
    let arena = Arena::of(memory);
    let Ok(mut next) = arena.take_retired(BY.retires.slot, Retirees::Node);
    let mut all = BTreeSet::new();
    while next != 0 {
        assert!(all.insert(next), "the list has a cycle");
        let Ok(Some((_, buffer))) = arena.buffer_at(next) else { panic!("{next:#x} is no buffer") };
        let Ok(state) = arena.state(&buffer);
        next = state.next;
    }
    all
}

#[test]
fn a_reclaiming_cas_retires_the_loser_or_the_old_buffer_once() {
    // Before each access another client swaps the word, or no client does. In between, the node also takes retired
    // lists.
    let (mut lost, mut won) = (0, 0);
    for moment in 0..60 {
        let (memory, table) = node();
        let [old, theirs, part] = [(); 3].map(|()| take(&memory, 1, class(), Supply::Quota, OWNER));
        memory.poke(table, &old.to_le_bytes());
        let mut all = BTreeSet::new();
        let meddle = |memory: &Bytes, done| {
            if done == moment && memory.peek(table, 8) == old.to_le_bytes() {
                memory.poke(table, &theirs.to_le_bytes());
            }
            if done % 3 == moment % 3 {
                all.append(&mut retired(memory));
            }
        };
        let (mut buf, expected, garbage) = (ChainBuf::new(), U64::new(old), [Addr::new(part)]);
        let slot = Addr::new(table);
        let (reply, accesses) =
            torn(&memory, moment as u64, &mut buf, |c| put(c, slot, &expected, &garbage), meddle);
        all.append(&mut retired(&memory));
        let now = u64::from_le_bytes(memory.peek(table, 8).try_into().expect("eight bytes"));
        let swung = reply.statuses().nth(1).expect("three ops") == Status::Ok;
        if swung {
            won += 1;
            assert_eq!((all, reply.retired()), (BTreeSet::from([old, part]), 2), "before access {moment}");
            assert!(now == theirs || state_of(&memory, now) == (Stage::Live, OWNER));
        } else {
            lost += 1;
            assert_eq!((now, all.len(), reply.retired()), (theirs, 1, 1), "before access {moment}");
            assert!(all.is_disjoint(&BTreeSet::from([old, theirs, part])), "the loser's own buffer");
            assert_eq!(state_of(&memory, old), (Stage::Live, OWNER), "the winner retires it");
        }
        assert!(accesses.len() > 10);
    }
    println!("won {won} times, lost {lost} times");
    assert!(won > 10 && lost > 3);
}

#[test]
fn a_reclaiming_cas_that_did_not_run_retires_its_allocation() {
    let plain = |status: Status| (status == Status::Ok).then_some(());
    for (name, expected) in
        [("skipped", Status::Skipped), ("aborted", Status::Aborted), ("null", Status::NullPointer)]
    {
        let (memory, table) = node();
        let old = take(&memory, 1, class(), Supply::Quota, OWNER);
        memory.poke(table, &old.to_le_bytes());
        let (mut buf, mut reply) = (ChainBuf::new(), Reply::new());
        let (word, other) = (U64::new(old), U64::new(1));
        let mut chain = buf.begin(key(1));
        also(&mut chain, allocate(LIST, [b"new", b"", b""]).redirect(Addr::scratch(0)));
        let slot = Addr::new(table);
        match expected {
            Status::Skipped => also(&mut chain, cas(Mode::Eq, Addr::new(table + 64), &other, &other)),
            Status::Aborted => also(&mut chain, read(Addr::new(64), 8)),
            _ => {}
        }
        let swing = cas_from(
            if expected == Status::NullPointer { Addr::new(table + 64) } else { slot },
            &word,
            Addr::scratch(0),
        );
        then(
            &mut chain,
            if expected == Status::NullPointer { swing.indirect() } else { swing }.reclaiming(0),
        );
        let Ok(()) = run(&memory, BY, chain.view(), &mut reply);
        assert_eq!(reply.last_status(), expected);
        assert_eq!(plain(reply.statuses().next().expect("an op")), Some(()), "{name}: it was allocated");
        let all = retired(&memory);
        assert_eq!((all.len(), reply.retired()), (1, 1), "{name}");
        assert!(!all.contains(&old));
    }
}

#[test]
fn each_reclaiming_cas_settles_the_allocations_since_the_last() {
    let (memory, table) = node();
    let old = [(); 3].map(|()| take(&memory, 1, class(), Supply::Quota, OWNER));
    old.iter().zip(0..).for_each(|(at, n)| memory.poke(table + 8 * n, &at.to_le_bytes()));
    let slot = |n: u64| Addr::new(table + 8 * n);
    let (words, wrong) = (old.map(U64::new), U64::new(7));
    let (mut buf, mut reply) = (ChainBuf::new(), Reply::new());
    let mut chain = buf.begin(key(1));
    let fill = |to: u64| allocate(LIST, [b"new", b"", b""]).redirect(Addr::scratch(to));
    // The first CAS fails. The second succeeds, although scratch still holds the first buffer's address. The last two
    // share an allocation: the third fails and retires the buffer, so the fourth installs a retired buffer.
    also(&mut chain, fill(0));
    also(&mut chain, cas_from(slot(0), &wrong, Addr::scratch(0)).reclaiming(0));
    also(&mut chain, fill(8));
    also(&mut chain, cas_from(slot(1), &words[1], Addr::scratch(8)).reclaiming(0));
    also(&mut chain, fill(16));
    also(&mut chain, cas_from(slot(2), &wrong, Addr::scratch(16)).reclaiming(0));
    also(&mut chain, cas_from(slot(2), &words[2], Addr::scratch(16)).reclaiming(0));
    let out = chain.also(read(Addr::scratch(0), 24));
    let Ok(()) = run(&memory, BY, chain.view(), &mut reply);
    let fresh: Vec<u64> = reply
        .get(out)
        .expect("read")
        .chunks(8)
        .map(|at| u64::from_le_bytes(at.try_into().expect("eight bytes")))
        .collect();
    assert_eq!(retired(&memory), BTreeSet::from([fresh[0], old[1], fresh[2], old[2]]));
    assert_eq!(reply.retired(), 4);
    assert_eq!(state_of(&memory, fresh[1]), (Stage::Live, OWNER));
    assert_eq!(state_of(&memory, old[0]), (Stage::Live, OWNER));
}

#[test]
fn a_reclaiming_cas_keeps_an_unchanged_pointers_buffer() {
    let (memory, table) = node();
    let old = take(&memory, 1, class(), Supply::Quota, OWNER);
    let word =
        |tag: u64| -> [u8; 16] { [old.to_le_bytes(), tag.to_le_bytes()].concat().try_into().expect("16") };
    memory.poke(table, &word(1));
    let (before, after) = (word(1), word(2));
    let (mut buf, mut reply) = (ChainBuf::new(), Reply::new());
    let mut chain = buf.begin(key(1));
    also(&mut chain, cas(Mode::Eq, Addr::new(table), &before, &after).reclaiming(0));
    let Ok(()) = run(&memory, BY, chain.view(), &mut reply);
    assert_eq!((reply.last_status(), reply.retired()), (Status::Ok, 0));
    assert_eq!(state_of(&memory, old), (Stage::Live, OWNER));

    // A reclaiming CAS on scratch is refused, since no other chain could see the swap. The new buffer is retired.
    let zero = [0u8; 16];
    let mut chain = buf.begin(key(1));
    also(&mut chain, write(Addr::scratch(0), &before));
    also(&mut chain, allocate(LIST, [b"new", b"", b""]).redirect(Addr::scratch(16)));
    then(&mut chain, cas(Mode::Ne, Addr::scratch(0), &zero, &zero).reclaiming(0));
    also(&mut chain, read(Addr::scratch(0), 16));
    let Ok(()) = run(&memory, BY, chain.view(), &mut reply);
    let statuses: Vec<Status> = reply.statuses().collect();
    assert_eq!(statuses, [Status::Ok, Status::Ok, Status::Invalid, Status::Aborted]);
    assert_eq!((reply.retired(), retired(&memory).len()), (1, 1));
    assert_eq!(state_of(&memory, old), (Stage::Live, OWNER));
}

#[test]
fn a_reserved_buffer_retired_by_another_is_on_one_list_only() {
    // Any client with the key can retire a buffer that a running chain has reserved. This client fault must not harm
    // the node. The chain does not use the buffer, and frees it.
    let other = SessionId { slot: 3, number: 99 };
    let mut fired = 0;
    for moment in 0..40 {
        let (memory, table) = node();
        let mut retired = None;
        let meddle = |memory: &Bytes, done| {
            if done == moment && retired.is_none() {
                let arena = Arena::of(memory);
                let Ok(Some((buffer, _))) = arena.buffer_state(1, 0) else { return };
                let Ok(joined) = arena.retire(other, 1, buffer.at);
                retired = joined.map(|_| buffer.at);
            }
        };
        let mut buf = ChainBuf::new();
        torn(
            &memory,
            0,
            &mut buf,
            |c| {
                also(c, cas(Mode::Ne, Addr::new(table), &[0u8; 8], &[0u8; 8]));
                then(c, allocate(LIST, [b"unused", b"", b""]));
            },
            meddle,
        );
        let Some(at) = retired else { continue };
        fired += 1;
        let arena = Arena::of(&memory);
        let Ok(Some((_, buffer))) = arena.buffer_at(at) else { panic!("it is a buffer") };
        let Ok(state) = arena.state(&buffer);
        let Ok(first_retired) = arena.take_retired(other.slot, Retirees::Node);
        assert_eq!(first_retired, at);
        let free = free_list(&memory, 1, class());
        assert_eq!(state.stage, Stage::Retired, "retired before access {moment}, and freed as well");
        assert!(!free.contains(&at), "retired before access {moment}, and free");
    }
    println!("a peer retired the buffer at {fired} moments");
    assert!(fired > 0);
}

fn also<'a, T: ?Sized>(chain: &mut Chain<'a>, op: Op<'a, T>) {
    let _ = chain.also(op);
}

fn then<'a, T: ?Sized>(chain: &mut Chain<'a>, op: Op<'a, T>) {
    let _ = chain.then(op);
}
