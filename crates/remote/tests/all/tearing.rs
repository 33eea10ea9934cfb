//! Chains among everybody else's accesses: what may be seen torn, what never is, and that replay is sound.

use crate::support::tearing::{Access, Tearing};
use crate::support::{Bytes, Random, assign, free_list, give, grant, key, open, revoke, take};
use farside_remote::arena::Arena;
use farside_remote::arena::class::Class;
use farside_remote::arena::lists::Supply;
use farside_remote::arena::segment::Use;
use farside_remote::arena::session::SessionId;
use farside_remote::arena::state::Stage;
use farside_remote::op::{ListId, Op, write_from};
use farside_remote::{Addr, BoundedPtr, Chain, ChainBuf, Mode, Reply, Status};
use farside_remote::{allocate, cas, fetch_add, read, run, write};
use std::collections::BTreeSet;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

const OWNER: u32 = 5;
const CLASS: u8 = 4;
const LIST: ListId = ListId(CLASS as u32);

fn class() -> &'static Class {
    Class::get(CLASS).expect("a class")
}

/// A table of region 1, and buffers of it.
fn node() -> (Bytes, u64) {
    let memory = Bytes::new(8 << 20);
    open(&memory, 1);
    assign(&memory, 0, 1, Use::Table);
    grant(&memory, 1, 1, Supply::Quota);
    let at = Arena::of(&memory).geometry().segment_at(0);
    (memory, at)
}

/// Runs what `build` asks for under a seed, with `between` in between.
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
    let accesses = Tearing::new(memory, seed, between).run(OWNER, chain.view(), &mut reply);
    (reply, accesses)
}

/// Fills `len` bytes with a number that was not there before.
fn rewrite(memory: &Bytes, at: u64, len: usize, version: &mut u8) {
    *version += 1;
    memory.poke(at, &vec![*version; len]);
}

/// How many different versions the bytes are of.
fn versions(bytes: &[u8]) -> usize {
    bytes.iter().collect::<BTreeSet<_>>().len()
}

#[test]
fn a_long_read_may_be_torn_but_never_within_an_aligned_unit() {
    let (memory, table) = node();
    let mut torn_reads = 0;
    for seed in 0..200 {
        let (mut version, mut random) = (0, Random::new(seed));
        rewrite(&memory, table, 128, &mut version);
        let write_now_and_then = |memory: &Bytes, _| {
            if random.once_in(2) {
                rewrite(memory, table, 128, &mut version);
            }
        };
        let mut buf = ChainBuf::new();
        let at = Addr::new(table);
        let (reply, _) = torn(&memory, seed, &mut buf, |c| also(c, read(at, 128)), write_now_and_then);
        assert_eq!(reply.verdict(), Status::Ok);
        let bytes = reply.output(0);
        assert!(bytes.chunks(16).all(|unit| versions(unit) == 1), "seed {seed}: a unit was torn");
        torn_reads += u32::from(versions(bytes) > 1);
    }
    println!("{torn_reads} of 200 reads of 128 bytes were torn");
    assert!(torn_reads > 20, "this memory does not tear");
}

#[test]
fn an_aligned_read_of_sixteen_bytes_is_never_torn_and_one_across_lines_may_be() {
    let (memory, table) = node();
    let mut torn_reads = 0;
    for seed in 0..200 {
        for (offset, aligned) in [(0, true), (48, true), (56, false)] {
            let (mut version, mut random) = (0, Random::new(seed));
            rewrite(&memory, table, 128, &mut version);
            let write_now_and_then = |memory: &Bytes, _| {
                if random.once_in(2) {
                    rewrite(memory, table, 128, &mut version);
                }
            };
            let mut buf = ChainBuf::new();
            let at = Addr::new(table + offset);
            let (reply, accesses) =
                torn(&memory, seed, &mut buf, |c| also(c, read(at, 16)), write_now_and_then);
            assert!(!aligned || versions(reply.output(0)) == 1, "seed {seed}: a slot was torn");
            assert_eq!(aligned, accesses.iter().any(|access| matches!(access, Access::Load { .. })));
            torn_reads += u32::from(versions(reply.output(0)) > 1);
        }
    }
    println!("{torn_reads} of 200 reads across two lines were torn");
    assert!(torn_reads > 20, "this memory does not tear");
}

#[test]
fn a_copy_within_the_node_keeps_aligned_words_whole_wherever_it_begins() {
    let (memory, table) = node();
    let to = table + 8192;
    for seed in 0..100 {
        for offset in [0, 8, 1, 15, 16, 31, 48] {
            for redirected in [false, true] {
                let (mut version, mut random) = (0, Random::new(seed));
                rewrite(&memory, table, 2048, &mut version);
                let write_now_and_then = |memory: &Bytes, _| {
                    if random.once_in(3) {
                        rewrite(memory, table, 2048, &mut version);
                    }
                };
                let mut buf = ChainBuf::new();
                let (from, to) = (Addr::new(table + offset), Addr::new(to + offset));
                let build = |c: &mut Chain<'_>| {
                    if redirected {
                        also(c, read(from, 1500).redirect(to));
                    } else {
                        also(c, write_from(to, from, 1500));
                    }
                };
                torn(&memory, seed, &mut buf, build, write_now_and_then);
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
fn a_wide_word_is_compared_and_swapped_at_one_instant() {
    let (memory, table) = node();
    let mut retries = 0;
    for seed in 0..200 {
        let (mut version, mut random) = (0, Random::new(seed));
        rewrite(&memory, table, 32, &mut version);
        let write_now_and_then = |memory: &Bytes, _| {
            if random.once_in(2) {
                rewrite(memory, table, 32, &mut version);
            }
        };
        let mut buf = ChainBuf::new();
        // Version 255 is none, so that every exchange is tried, and only a writer in between can make it fail.
        let op = cas(Mode::Ne, Addr::new(table), &[255u8; 32], &[254u8; 32]);
        let (reply, accesses) = torn(&memory, seed, &mut buf, |c| also(c, op), write_now_and_then);
        assert_eq!(reply.verdict(), Status::Ok, "seed {seed}");
        assert_eq!(versions(reply.output(0)), 1, "seed {seed}: the old value was torn");
        assert_eq!(memory.peek(table, 32), [254; 32], "seed {seed}: nobody came after the exchange");
        let exchanges = accesses.iter().filter(|access| matches!(access, Access::ExchangeWide { .. }));
        retries += exchanges.count() - 1;
    }
    println!("200 exchanges, tried again {retries} times");
    assert!(retries > 20);
}

#[test]
fn a_pointer_and_what_it_points_to_are_of_different_moments() {
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
    // The new bytes, the old ones, and those of a buffer that is nobody's any more.
    assert_eq!(seen, BTreeSet::from([1, 2, 9]));
}

#[test]
fn a_question_sees_the_rights_of_its_moment_and_its_answer_stays() {
    let (memory, table) = node();
    memory.poke(table + 64, &[3; 32]);
    let pointer = BoundedPtr { ptr: Addr::new(table + 64), bound: U32::new(32), tag: U32::ZERO };
    memory.poke(table, pointer.as_bytes());
    // The key; the right to the pointer; the pointer; the right to the pointee; the pointee. The key is asked for once,
    // so that a chain that was admitted runs on, as does an access whose right was answered before it was lost.
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
fn a_replayed_chain_makes_each_access_once_and_ends_as_if_it_had_run_at_once() {
    for seed in 0..20 {
        let (memory, table) = node();
        let (plain, _) = node();
        for memory in [&memory, &plain] {
            memory.poke(table, &Random::new(seed).bytes(4096));
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
            then(c, allocate(LIST, [item, b"", b""]));
            also(c, read(Addr::scratch(0), 32));
            also(c, read(at(1024), 700).redirect(at(3000)));
        }
        let mut buf = ChainBuf::new();
        let mut chain = buf.begin(key(1));
        build(&mut chain, table, &one, &large, &item, &swap);
        let mut reply = Reply::new();
        let Ok(()) = run(&plain, OWNER, chain.view(), &mut reply);

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
        assert!(memory.all() == plain.all(), "seed {seed}: memory ends otherwise than in one go");
        // One after another, none twice, however often the chain was begun again.
        assert_eq!(moments, (0..accesses.len()).collect::<Vec<_>>());
        println!("{} accesses, the chain was begun {} times", accesses.len(), accesses.len() + 1);
    }
}

#[test]
fn whatever_a_reply_held_before_is_gone() {
    let (memory, table) = node();
    let mut buf = ChainBuf::new();
    let mut reply = Reply::new();
    let mut long = buf.begin(key(1));
    for _ in 0..20 {
        also(&mut long, read(Addr::new(table), 1000));
    }
    let Ok(()) = run(&memory, OWNER, long.view(), &mut reply);
    let mut short = buf.begin(key(1));
    also(&mut short, read(Addr::new(table), 3));
    Tearing::new(&memory, 0, |_: &Bytes, _| {}).run(OWNER, short.view(), &mut reply);
    let mut fresh = Reply::new();
    let Ok(()) = run(&memory, OWNER, short.view(), &mut fresh);
    assert_eq!(reply.as_bytes(), fresh.as_bytes());
}

#[test]
fn a_buffer_that_another_retires_while_a_chain_holds_it_is_on_one_list_only() {
    // Whoever has the key can retire what a running chain has reserved: a fault of a client, which must not be the
    // node's end. The chain, which does not use the buffer, gives it back.
    let other = SessionId { slot: 3, number: 99 };
    let mut fired = 0;
    for moment in 0..40 {
        let (memory, table) = node();
        let mut retired = None;
        let meddle = |memory: &Bytes, done| {
            if done == moment && retired.is_none() {
                let arena = Arena::of(memory);
                let Ok(Some((buffer, _))) = arena.buffer_state(1, 0) else { return };
                let Ok(done) = arena.retire(other, key(1), buffer.at);
                retired = done.then_some(buffer.at);
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
        let Ok(first_retired) = arena.take_retired(other.slot);
        assert_eq!(first_retired, at);
        let free = free_list(&memory, 1, class());
        assert_eq!(state.stage, Stage::Retired, "retired before access {moment}, and given back as well");
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
