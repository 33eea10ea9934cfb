//! The claims of the conformance suite: properties that every fabric must have.

use super::chains::{Operands, WORKED, build, pointers};
use super::executors::{Executor, Task};
use super::rig::{Endpoint, NODE, PLAIN, Rig, SLOW};
use super::twin::Twin;
use farside_fabrics::executor::{TASKS_MAX, block_on};
use farside_fabrics::timer;
use farside_remote::arena::session::SessionId;
use farside_remote::control::{Answer, Ask, Store};
use farside_remote::draws::Draws;
use farside_remote::fabric::{CALL_BYTES_MAX, DEADLINE, Ran, ServiceId};
use farside_remote::op::ListId;
use farside_remote::service::{ADDRESS_SIZE, address};
use farside_remote::wire::{Code, OPS_MAX, REPLY_BYTES_MAX};
use farside_remote::{
    Addr, By, Chain, ChainBuf, Fabric, FabricError, Key, Memory, Mode, NodeId, Reply, Status, allocate, cas,
    cas_from, fetch_add, read, read_as, retire, run, write,
};
use rustix::time::{ClockId, clock_gettime};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::{Duration, Instant};
use zerocopy::little_endian::U64;

/// The lists of free buffers of the smallest class (`SMALL`) and of the largest class.
const SMALL: ListId = ListId(0);
const LARGE: ListId = ListId(40);
const LARGE_SIZE: u64 = 64 * 1024;

fn key(store: &Store) -> Key {
    store.extent().key
}

fn table(store: &Store, offset: u64) -> Addr {
    Addr::new(store.table_at + offset)
}

async fn carry<E: Endpoint>(endpoint: &E, chain: &Chain<'_>, reply: &mut Reply) {
    endpoint.run(NODE, chain, reply).await.expect("a live node");
}

fn statuses(reply: &Reply) -> Vec<Status> {
    reply.statuses().collect()
}

// The meaning of ops.

fn by(owner: u32) -> By {
    By { owner, retires: SessionId { slot: 0, number: owner } }
}

pub(crate) fn every_op_does_what_run_says<R: Rig>(rig: &R, executor: Executor) {
    const CHAINS: usize = 4000;
    let (endpoint, store) = rig.client();
    let twin = Twin::of(rig.memory(), key(&store));
    let seen = Rc::new(RefCell::new(BTreeSet::new()));
    let (client, tally, of) = (Rc::clone(&endpoint), Rc::clone(&seen), store.clone());
    let twin = Rc::new(twin);
    let copy = Rc::clone(&twin);
    executor.run(&endpoint, async move {
        let (mut random, mut buffer) = (Draws(1), ChainBuf::new());
        let (mut reply, mut expected) = (Reply::new(), Reply::new());
        for number in 0..CHAINS {
            let first = pointers(&of, &mut random);
            let operands = Operands::draw(&of, &mut random);
            let mut chain = buffer.begin(key(&of));
            if number % 50 == 0 {
                let _ = chain.also(write(table(&of, 0), &first));
            } else {
                build(&mut chain, &of, &operands, &mut random);
            }
            carry(&*client, &chain, &mut reply).await;
            let Ok(()) = run(&*copy, by(client.owner()), chain.view(), &mut expected);
            assert_eq!(statuses(&reply), statuses(&expected), "chain {number}");
            assert!(reply.as_bytes() == expected.as_bytes(), "chain {number} has a different output");
            let ops = chain.view().ops().map(|op| op.code() as u8).zip(reply.statuses());
            tally.borrow_mut().extend(ops.map(|(code, status)| (code, status as u8)));
        }
    });
    let mut bytes = vec![0; 2 * WORKED as usize];
    let Ok(()) = rig.memory().read(store.table_at, &mut bytes);
    assert!(bytes == twin.bytes(store.table_at, 2 * WORKED), "the table has different bytes");
    // The chains together were thorough: every op succeeded, was skipped, was aborted and was denied, and every status
    // but NOT READY occurred.
    let seen = seen.borrow();
    for code in 1..=6 {
        for status in [Status::Ok, Status::Skipped, Status::Aborted, Status::Access] {
            // These two access nothing that the key protects.
            if status == Status::Access && [Code::Allocate as u8, Code::Retire as u8].contains(&code) {
                continue;
            }
            assert!(seen.contains(&(code, status as u8)), "op {code} never had {status:?}");
        }
    }
    for status in Status::ALL.into_iter().filter(|&status| status != Status::NotReady) {
        assert!(seen.iter().any(|&(_, seen)| seen == status as u8), "{status:?} never occurred");
    }
}

pub(crate) fn the_rest_of_a_chain_depends_on_the_previous_op<R: Rig>(rig: &R, executor: Executor) {
    use Status::{Aborted, Access, CasFailed, Invalid, NullPointer, Ok as Done, Skipped, TooLong};
    let (endpoint, store) = rig.client();
    let client = Rc::clone(&endpoint);
    executor.run(&endpoint, async move {
        let word = table(&store, 64);
        let (zero, one) = (U64::new(0), U64::new(1));
        // Each row has the statuses of an op, of two that follow by `then`, of one by `also`, and of another by `then`.
        let table_of_truth = [
            (read(word, 8), [Done, Done, Done, Done, Done]),
            (read(word, 70_000), [TooLong, Skipped, Skipped, Done, Done]),
            (read(word, 8).indirect(), [NullPointer, Skipped, Skipped, Done, Done]),
            (read(table(&store, 1), 8).indirect(), [Invalid, Aborted, Aborted, Aborted, Aborted]),
            (read(Addr::new(64), 8), [Access, Aborted, Aborted, Aborted, Aborted]),
        ];
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        for (first, expected) in table_of_truth {
            let mut chain = buffer.begin(key(&store));
            let _ = chain.also(first);
            rest(&mut chain, word);
            carry(&*client, &chain, &mut reply).await;
            assert_eq!(statuses(&reply), expected);
        }
        for (compare, expected) in [(&zero, [Done; 5]), (&one, [CasFailed, Skipped, Skipped, Done, Done])] {
            let mut chain = buffer.begin(key(&store));
            let _ = chain.also(cas(Mode::Eq, word, compare, &zero));
            rest(&mut chain, word);
            carry(&*client, &chain, &mut reply).await;
            assert_eq!(statuses(&reply), expected);
        }
        // The first op of a chain has no op before it on which to depend.
        let mut chain = buffer.begin(key(&store));
        let _ = chain.then(read(word, 8));
        carry(&*client, &chain, &mut reply).await;
        assert_eq!(statuses(&reply), [Done]);
    });
}

fn rest(chain: &mut Chain<'_>, word: Addr) {
    let _ = chain.then(read(word, 8));
    let _ = chain.then(read(word, 8));
    let _ = chain.also(read(word, 8));
    let _ = chain.then(read(word, 8));
}

// Limits.

pub(crate) fn a_chain_has_at_most_64_ops_and_all_of_them_run<R: Rig>(rig: &R, executor: Executor) {
    let (endpoint, store) = rig.client();
    let client = Rc::clone(&endpoint);
    executor.run(&endpoint, async move {
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let one = U64::new(1);
        let mut chain = buffer.begin(key(&store));
        let olds: Vec<_> = (0..OPS_MAX).map(|_| chain.then(fetch_add(table(&store, 8), &one))).collect();
        carry(&*client, &chain, &mut reply).await;
        for (expected, old) in olds.into_iter().enumerate() {
            assert_eq!(reply.get(old).map(|old| old.get()), Ok(expected as u64));
        }
    });
}

pub(crate) fn an_output_that_exceeds_the_reply_is_too_long<R: Rig>(rig: &R, executor: Executor) {
    let (endpoint, store) = rig.client();
    let client = Rc::clone(&endpoint);
    executor.run(&endpoint, async move {
        const ENTRIES: usize = 4 * 8;
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(key(&store));
        let _ = chain.also(read(table(&store, 0), 60_000));
        let _ = chain.also(read(table(&store, 0), (REPLY_BYTES_MAX - ENTRIES - 60_000 + 1) as u32));
        let _ = chain.also(read(table(&store, 0), (REPLY_BYTES_MAX - ENTRIES - 60_000) as u32));
        let _ = chain.also(read(table(&store, 0), 1));
        carry(&*client, &chain, &mut reply).await;
        assert_eq!(statuses(&reply), [Status::Ok, Status::TooLong, Status::Ok, Status::TooLong]);
        assert_eq!(reply.as_bytes().len(), REPLY_BYTES_MAX);
    });
}

pub(crate) fn a_payload_of_60_kib_arrives_intact<R: Rig>(rig: &R, executor: Executor) {
    let (endpoint, store) = rig.client();
    let client = Rc::clone(&endpoint);
    executor.run(&endpoint, async move {
        let payload: Vec<u8> = (0..60 * 1024).map(|i: u32| (i ^ (i >> 8)) as u8).collect();
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(key(&store));
        let _ = chain.also(write(table(&store, 3), &payload));
        carry(&*client, &chain, &mut reply).await;
        let mut chain = buffer.begin(key(&store));
        let _ = chain.also(allocate(LARGE, [b"", &payload, b""]).redirect(Addr::scratch(0)));
        let written = chain.then(read(table(&store, 3), payload.len() as u32));
        carry(&*client, &chain, &mut reply).await;
        assert!(reply.get(written) == Ok(&payload), "a read returns the bytes written");
        let mut chain = buffer.begin(key(&store));
        let at = chain.also(allocate(LARGE, [b"", &payload, b""]));
        carry(&*client, &chain, &mut reply).await;
        let at = *reply.get(at).expect("a buffer");
        let mut chain = buffer.begin(key(&store));
        let put = chain.also(read(at, payload.len() as u32));
        carry(&*client, &chain, &mut reply).await;
        assert!(reply.get(put) == Ok(&payload), "a read returns the buffer's bytes");
    });
}

pub(crate) fn a_chain_that_finds_no_buffer_runs_nothing<R: Rig>(rig: &R, executor: Executor) {
    let (endpoint, store) = rig.client();
    let client = Rc::clone(&endpoint);
    executor.run(&endpoint, async move {
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        for taken in 0..=store.quota / LARGE_SIZE {
            let mark = (taken + 1).to_le_bytes();
            let mut chain = buffer.begin(key(&store));
            let _ = chain.also(write(table(&store, 0), &mark));
            let _ = chain.also(allocate(LARGE, [b"", b"", b""]));
            carry(&*client, &chain, &mut reply).await;
            if reply.verdict() == Status::NotReady {
                assert_eq!(statuses(&reply), [Status::NotReady; 2]);
                let mut chain = buffer.begin(key(&store));
                let mark = chain.also(read_as::<U64>(table(&store, 0)));
                carry(&*client, &chain, &mut reply).await;
                assert_eq!(reply.get(mark).map(|mark| mark.get()), Ok(taken), "the WRITE did not run");
                return;
            }
            assert_eq!(reply.verdict(), Status::Ok);
        }
        panic!("more buffers were allocated than the quota has");
    });
}

// Rights.

pub(crate) fn a_wrong_key_gives_no_access<R: Rig>(rig: &R, executor: Executor) {
    let ops: [fn(&mut Chain<'_>, Addr); 7] = [
        |chain, at| _ = chain.also(read(at, 8)),
        |chain, at| _ = chain.also(write(at, b"spoilt")),
        |chain, at| _ = chain.also(cas(Mode::Eq, at, &U64::ZERO, &U64::MAX_VALUE)),
        |chain, at| _ = chain.also(fetch_add(at, &U64::MAX_VALUE)),
        |chain, _| _ = chain.also(allocate(SMALL, [b"", b"", b""])),
        |chain, at| _ = chain.also(cas(Mode::Eq, at, &U64::ZERO, &U64::MAX_VALUE).reclaiming(0)),
        |chain, _| _ = chain.also(retire(&[Addr::NULL])),
    ];
    // Each op gets a client of its own, since a node may end a session after several denied chains.
    for op in ops {
        let (endpoint, store) = rig.client();
        let client = Rc::clone(&endpoint);
        executor.run(&endpoint, async move {
            let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
            let at = table(&store, 0);
            let wrong = [
                Key::new(store.region, store.secret ^ 1),
                Key::new(store.region, 0),
                Key::new(store.region + 1, store.secret),
                Key::new(0, store.secret),
                Key::new(u32::MAX, store.secret),
            ];
            for key in wrong {
                let mut chain = buffer.begin(key);
                op(&mut chain, at);
                carry(&*client, &chain, &mut reply).await;
                assert_eq!(statuses(&reply), [Status::Access], "{key:?}");
            }
            let mut chain = buffer.begin(self::key(&store));
            let untouched = chain.also(read_as::<U64>(at));
            carry(&*client, &chain, &mut reply).await;
            assert_eq!(reply.get(untouched), Ok(&U64::ZERO));
        });
    }
}

pub(crate) fn another_node_is_an_error<R: Rig>(rig: &R, executor: Executor) {
    let (endpoint, store) = rig.client();
    let client = Rc::clone(&endpoint);
    executor.run(&endpoint, async move {
        let (mut buffer, mut reply, other) = (ChainBuf::new(), Reply::new(), NodeId(7));
        let mut chain = buffer.begin(key(&store));
        let _ = chain.also(write(table(&store, 0), b"spoilt"));
        let error = client.run(other, &chain, &mut reply).await.expect_err("no such node");
        assert_eq!((&error, error.ran()), (&FabricError::NoSuchNode(other), Ran::No));
        let called = client.call(other, ServiceId::NODE, b"", &mut Vec::new()).await;
        assert_eq!(called, Err(FabricError::NoSuchNode(other)));
        client.retire(other, key(&store), table(&store, 0));
        let mut chain = buffer.begin(key(&store));
        let untouched = chain.also(read_as::<U64>(table(&store, 0)));
        carry(&*client, &chain, &mut reply).await;
        assert_eq!(reply.get(untouched), Ok(&U64::ZERO));
    });
}

// Concurrent chains.

pub(crate) fn scratch_is_private_to_a_chain_and_zero_at_its_start<R: Rig>(rig: &R, executor: Executor) {
    let (endpoint, store) = rig.client();
    let tasks = (0..16u8).map(|task| -> Task {
        let (client, store) = (Rc::clone(&endpoint), store.clone());
        Box::pin(async move {
            let (mut buffer, mut reply, mine) = (ChainBuf::new(), Reply::new(), [task + 1; 32]);
            for _ in 0..200 {
                let mut chain = buffer.begin(key(&store));
                let before = chain.also(read(Addr::scratch(0), 32));
                let _ = chain.also(write(Addr::scratch(0), &mine));
                let after = chain.also(read(Addr::scratch(0), 32));
                let beyond = chain.also(read(Addr::scratch(31), 2));
                carry(&*client, &chain, &mut reply).await;
                assert_eq!(reply.get(before), Ok(&[0; 32][..]));
                assert_eq!(reply.get(after), Ok(&mine[..]));
                assert_eq!(reply.status(beyond), Status::Access);
            }
        })
    });
    executor.run_all(&endpoint, tasks.collect());
}

pub(crate) fn a_dropped_run_does_no_harm<R: Rig>(rig: &R, executor: Executor) {
    const TASKS: u64 = 16;
    const TURNS: u64 = 200;
    let (endpoint, store) = rig.client();
    let ran = Rc::new(Cell::new(0));
    let tasks = (0..TASKS).map(|task| -> Task {
        let (client, store, ran) = (Rc::clone(&endpoint), store.clone(), Rc::clone(&ran));
        Box::pin(async move {
            let (mut buffer, mut reply, one) = (ChainBuf::new(), Reply::new(), U64::new(1));
            for turn in 0..TURNS {
                let mut chain = buffer.begin(key(&store));
                let _ = chain.also(fetch_add(table(&store, 8), &one));
                if (task + turn) % 3 == 0 {
                    let ended = once(client.run(NODE, &chain, &mut reply)).await;
                    ran.set(ran.get() + u64::from(ended.is_some()));
                } else {
                    carry(&*client, &chain, &mut reply).await;
                    ran.set(ran.get() + 1);
                }
            }
        })
    });
    executor.run_all(&endpoint, tasks.collect());
    let client = Rc::clone(&endpoint);
    executor.run(&endpoint, async move {
        // A chain whose future was dropped may have run or not; all others ran once.
        let sum = sum_at(&*client, &store, 8).await;
        assert!((ran.get()..=TASKS * TURNS).contains(&sum), "{sum} of {}", ran.get());
    });
}

/// Polls a future once and drops it. Returns its output if it completed.
async fn once<O>(future: impl Future<Output = O>) -> Option<O> {
    polled(1, future).await
}

/// Polls a future at most `times` times, each time after a wake-up, and drops it. Returns its output if it completed.
async fn polled<O>(times: u32, future: impl Future<Output = O>) -> Option<O> {
    let (mut future, mut left) = (pin!(future), times);
    std::future::poll_fn(|cx| {
        left -= 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Tests the contract of [`Chain::holds`] and [`Chain::note_posted`] for the buffers of a dropped chain:
/// - If the chain was posted and did not publish the buffers, the fabric retires them.
/// - If the chain was not posted, the caller retires them.
/// - If the chain has published the buffers, they stay.
///
/// Memory suffices for a third of the rounds, so a leak would exhaust it.
pub(crate) fn unpublished_buffers_of_a_dropped_chain_are_freed<R: Rig>(rig: &R, executor: Executor) {
    let (endpoint, store) = rig.client();
    let client = Rc::clone(&endpoint);
    executor.run(&endpoint, async move {
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let slot = table(&store, 64);
        let (mut dropped, mut shown) = (0u64, BTreeSet::new());
        for round in 0..3 * store.quota / LARGE_SIZE {
            let until = timer::now() + Duration::from_secs(10);
            let (now, fresh) = loop {
                let mut chain = buffer.begin(key(&store));
                let now = chain.also(read_as::<Addr>(slot));
                let fresh = chain.also(allocate(LARGE, [b"item", b"", b""]));
                carry(&*client, &chain, &mut reply).await;
                if reply.verdict() != Status::NotReady {
                    break (*reply.get(now).expect("a word"), *reply.get(fresh).expect("a buffer"));
                }
                assert!(timer::now() < until, "round {round}: no buffer is freed");
                timer::sleep(Duration::from_millis(1)).await;
            };
            assert_ne!(now, fresh, "round {round}: a published buffer was retired");
            shown.insert(now.raw());
            let expected = if round % 4 == 0 { now } else { now.plus(1) };
            let (held, is_posted) = ([fresh], Cell::new(false));
            let mut chain = buffer.begin(key(&store));
            let swung = chain.also(cas(Mode::Eq, slot, &expected, &fresh).reclaiming(0));
            chain.holds(&held, swung, &is_posted);
            // One chain in five completes. How often the others must be polled until they are sent depends on the
            // fabric.
            let polls = if round % 5 == 0 { u32::MAX } else { (round % 5) as u32 };
            let ended = polled(polls, client.run(NODE, &chain, &mut reply)).await;
            let mut is_shown = false;
            match &ended {
                None => dropped += 1,
                Some(ran) => {
                    chain.note_outcome(ran);
                    is_shown = reply.status(swung) == Status::Ok;
                }
            }
            if !is_posted.get() && !is_shown {
                client.retire(NODE, key(&store), fresh);
            }
        }
        // A client that runs its chains itself and has no other task has run each chain by the first poll.
        assert_eq!(dropped == 0, R::Endpoint::RUNS_HERE, "{dropped} futures were dropped early");
        assert!(shown.len() > 2, "no chain has published its buffers");
    });
}

async fn sum_at<E: Endpoint>(endpoint: &E, store: &Store, offset: u64) -> u64 {
    let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
    let mut chain = buffer.begin(key(store));
    let sum = chain.also(read_as::<U64>(table(store, offset)));
    carry(endpoint, &chain, &mut reply).await;
    reply.get(sum).expect("a word").get()
}

pub(crate) fn only_live_buffers_are_retired<R: Rig>(rig: &R, executor: Executor) {
    // This buffer belongs to another live session. A session may retire only buffers that it has allocated itself.
    let (other, others) = rig.client();
    let kept = block_on(&*other, take(&*other, &others, b"kept"));
    let (endpoint, store) = rig.client();
    let client = Rc::clone(&endpoint);
    executor.run(&endpoint, async move {
        let gone = take(&*client, &store, b"gone").await;
        client.retire(NODE, key(&store), Addr::NULL);
        client.retire(NODE, key(&store), table(&store, 0));
        client.retire(NODE, key(&store), kept.plus(16));
        client.retire(NODE, key(&store), Addr::scratch(0));
        client.retire(NODE, key(&store), Addr::new(u64::MAX >> 1));
        client.retire(NODE, Key::new(store.region, store.secret ^ 1), kept);
        client.retire(NODE, key(&store), kept);
        let garbage = [
            Addr::NULL,
            table(&store, 0),
            kept.plus(16),
            Addr::scratch(0),
            Addr::new(u64::MAX >> 1),
            gone,
            gone,
        ];
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(key(&store));
        let _ = chain.also(retire(&garbage));
        let _ = chain.also(retire(&garbage));
        carry(&*client, &chain, &mut reply).await;
        assert_eq!(statuses(&reply), [Status::Ok; 2]);
        // These buffers would not all differ if one were twice on a list of free buffers, or if the kept one were on
        // any.
        let mut taken = BTreeSet::from([kept.raw()]);
        for number in 0..3000 {
            if number % 100 == 0 {
                block_on(&*other, take(&*other, &others, b"alive")); // A silent session would end, with its buffers.
            }
            let fresh = take(&*client, &store, b"new").await;
            assert!(taken.insert(fresh.raw()) || fresh == gone, "{fresh:?} was allocated twice");
        }
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(key(&store));
        let bytes = chain.also(read(kept, 4));
        carry(&*client, &chain, &mut reply).await;
        assert_eq!(reply.get(bytes), Ok(&b"kept"[..]));
    });
}

/// Tests that nothing leaks if a chain wins its CAS, loses it, or names the old buffer in a RETIRE. The rounds allocate
/// three times the quota, so a leak would exhaust it.
pub(crate) fn unreachable_buffers_are_freed<R: Rig>(rig: &R, executor: Executor) {
    let (endpoint, store) = rig.client();
    let client = Rc::clone(&endpoint);
    executor.run(&endpoint, async move {
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let tmp = Addr::scratch(8);
        let (mut now, slot) = (Addr::NULL, table(&store, 64));
        for round in 0..3 * store.quota / LARGE_SIZE {
            let expected = if round % 3 == 1 { now.plus(1) } else { now };
            let garbage = [now];
            let until = timer::now() + Duration::from_secs(10);
            loop {
                let mut chain = buffer.begin(key(&store));
                let _ = chain.also(allocate(LARGE, [b"item", b"", b""]).redirect(tmp));
                let swung = chain.then(cas_from(slot, &expected, tmp).reclaiming(0));
                // This RETIRE must not retire again what the CAS has just retired.
                let _ = chain.then(retire(&garbage));
                let fresh = chain.also(read_as::<Addr>(slot));
                carry(&*client, &chain, &mut reply).await;
                if reply.verdict() != Status::NotReady {
                    let lost = if round % 3 == 1 { Status::CasFailed } else { Status::Ok };
                    assert_eq!(reply.status(swung), lost, "round {round}");
                    now = *reply.get(fresh).expect("a word");
                    break;
                }
                assert!(timer::now() < until, "round {round}: no buffer is freed");
                timer::sleep(Duration::from_millis(1)).await;
            }
        }
        let mut chain = buffer.begin(key(&store));
        let item = chain.also(read(slot, 4).indirect());
        carry(&*client, &chain, &mut reply).await;
        assert_eq!(reply.get(item), Ok(&b"item"[..]));
    });
}

async fn take<E: Endpoint>(endpoint: &E, store: &Store, bytes: &[u8]) -> Addr {
    let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
    let mut chain = buffer.begin(key(store));
    let at = chain.also(allocate(SMALL, [bytes, b"", b""]));
    carry(endpoint, &chain, &mut reply).await;
    *reply.get(at).expect("a buffer")
}

pub(crate) fn sixty_four_tasks_run_concurrently<R: Rig>(rig: &R, executor: Executor) {
    const TURNS: u64 = 100;
    let (endpoint, store) = rig.client();
    let tasks = (0..TASKS_MAX).map(|_| add(&endpoint, &store, 8, TURNS)).collect();
    executor.run_all(&endpoint, tasks);
    let client = Rc::clone(&endpoint);
    executor.run(&endpoint, async move {
        assert_eq!(sum_at(&*client, &store, 8).await, TASKS_MAX as u64 * TURNS);
    });
}

fn add<E: Endpoint>(endpoint: &Rc<E>, store: &Store, offset: u64, turns: u64) -> Task {
    let (client, store) = (Rc::clone(endpoint), store.clone());
    Box::pin(async move {
        let (mut buffer, mut reply, one) = (ChainBuf::new(), Reply::new(), U64::new(1));
        for _ in 0..turns {
            let mut chain = buffer.begin(key(&store));
            let _ = chain.also(fetch_add(table(&store, offset), &one));
            carry(&*client, &chain, &mut reply).await;
        }
    })
}

pub(crate) fn additions_by_many_threads_sum_up<R: Rig>(rig: &R, executor: Executor) {
    const THREADS: u64 = 4;
    const TASKS: u64 = 4;
    const TURNS: u64 = 2000;
    drop(rig.client()); // Creates the store before the threads open it.
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let (endpoint, store) = rig.client();
                let tasks = (0..TASKS).map(|_| add(&endpoint, &store, 8, TURNS)).collect();
                executor.run_all(&endpoint, tasks);
            });
        }
    });
    let (endpoint, store) = rig.client(); // The first session may have ended by silence.
    let client = Rc::clone(&endpoint);
    executor.run(&endpoint, async move {
        assert_eq!(sum_at(&*client, &store, 8).await, THREADS * TASKS * TURNS);
    });
}

pub(crate) fn sixteen_bytes_never_tear<R: Rig>(rig: &R, executor: Executor) {
    const THREADS: usize = 3;
    drop(rig.client()); // Creates the store before the threads open it.
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let (endpoint, store) = rig.client();
                executor.run(&endpoint, swap(Rc::clone(&endpoint), store.clone(), R::SWAPS));
            });
        }
    });
    let (endpoint, store) = rig.client(); // The first session may have ended by silence.
    let client = Rc::clone(&endpoint);
    executor.run(&endpoint, async move {
        assert_eq!(sum_at(&*client, &store, 16).await, THREADS as u64 * R::SWAPS);
        assert_eq!(sum_at(&*client, &store, 24).await, THREADS as u64 * R::SWAPS);
    });
}

/// Increments both halves of a word together, `swaps` times. The halves must be equal in every READ and every failed
/// CAS.
async fn swap<E: Endpoint>(client: Rc<E>, store: Store, swaps: u64) {
    let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
    let (mut seen, mut done) = ([U64::ZERO; 2], 0);
    while done < swaps {
        let new = [U64::new(seen[0].get() + 1); 2];
        let mut chain = buffer.begin(key(&store));
        let swapped = chain.also(cas(Mode::Eq, table(&store, 16), &seen, &new));
        let long = chain.also(read(table(&store, 0), 64));
        carry(&*client, &chain, &mut reply).await;
        let old = *reply.get(swapped).expect("an old value");
        assert_eq!(old[0], old[1], "a CAS saw a torn word");
        let long = reply.get(long).expect("64 bytes");
        assert_eq!(long[16..24], long[24..32], "a READ saw a torn word");
        let succeeded = reply.status(swapped) == Status::Ok;
        assert_eq!(succeeded, old == seen);
        done += u64::from(succeeded);
        seen = if succeeded { new } else { old };
    }
}

// Calls.

pub(crate) fn a_call_that_cannot_be_served_is_refused<R: Rig>(rig: &R, executor: Executor) {
    let endpoint = rig.connect();
    let client = Rc::clone(&endpoint);
    executor.run(&endpoint, async move {
        let info = serde_json::to_vec(&Ask::NodeInfo).expect("plain data");
        let too_long = vec![b' '; CALL_BYTES_MAX + 1];
        let hopeless =
            [(ServiceId(99), &info[..]), (ServiceId::NODE, b"no question"), (ServiceId::NODE, &too_long)];
        let mut answer = Vec::new();
        for (service, request) in hopeless {
            let error = client.call(NODE, service, request, &mut answer).await.expect_err("an invalid call");
            assert!(matches!(error, FabricError::Refused(_)), "{error:?}");
            assert_eq!(error.ran(), Ran::No);
            client.call(NODE, ServiceId::NODE, &info, &mut answer).await.expect("a valid call");
            assert!(matches!(serde_json::from_slice(&answer), Ok(Answer::NodeInfo(_))));
        }
    });
}

/// Sends a request of `len` bytes to the store's service, and returns the number in the response.
async fn ask_to_add<E: Endpoint>(endpoint: &E, key: Key, len: usize) -> Result<u64, FabricError> {
    let (mut request, mut answer) = (Vec::new(), Vec::new());
    let service = address(key, &mut request);
    let asked: Vec<u8> = (0..len).map(|place| place as u8).collect();
    request.extend_from_slice(&asked);
    endpoint.call(NODE, service, &request, &mut answer).await?;
    let (sum, rest) = answer.split_first_chunk().expect("a sum");
    assert!(asked.get(8..).unwrap_or_default() == rest, "the response to another call");
    Ok(u64::from_le_bytes(*sum))
}

pub(crate) fn a_stores_service_handles_one_call_at_a_time<R: Rig>(rig: &R, executor: Executor) {
    const THREADS: usize = 3;
    const CALLS: u64 = 300;
    const LONGEST: usize = CALL_BYTES_MAX - ADDRESS_SIZE;
    let (endpoint, store) = rig.client();
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let (endpoint, store) = rig.client();
                let client = Rc::clone(&endpoint);
                executor.run(&endpoint, async move {
                    let mut before = 0;
                    for _ in 0..CALLS {
                        let sum = ask_to_add(&*client, key(&store), 1).await.expect("the service responds");
                        assert!(sum > before, "the sum was {before} and is {sum}");
                        before = sum;
                    }
                });
            });
        }
    });
    let client = Rc::clone(&endpoint);
    executor.run(&endpoint, async move {
        let sum = THREADS as u64 * CALLS + LONGEST as u64;
        assert_eq!(ask_to_add(&*client, key(&store), LONGEST).await, Ok(sum), "a sum was lost");
    });
}

pub(crate) fn a_stores_service_requires_the_stores_key<R: Rig>(rig: &R, executor: Executor) {
    let (endpoint, store) = rig.client();
    let client = Rc::clone(&endpoint);
    executor.run(&endpoint, async move {
        let own = key(&store);
        let refused = |called: Result<u64, FabricError>, why: &str| match called {
            Err(FabricError::Refused(reason)) => assert!(reason.contains(why), "{reason}"),
            other => panic!("expected a refusal, got {other:?}"),
        };
        assert_eq!(ask_to_add(&*client, own, 3).await, Ok(3));
        for wrong in [Key::new(own.region(), !own.secret()), Key::new(own.region() + 1, own.secret())] {
            refused(ask_to_add(&*client, wrong, 5).await, "open it again");
        }
        refused(ask_to_add(&*client, own, 0).await, "the request is empty");
        let mut answer = Vec::new();
        for short in 0..ADDRESS_SIZE {
            let called = client.call(NODE, ServiceId(own.region()), &[0; ADDRESS_SIZE][..short], &mut answer);
            let error = called.await.expect_err("a request without a key");
            assert!(matches!(error, FabricError::Refused(_)), "{error:?}");
        }
        assert_eq!(ask_to_add(&*client, own, 4).await, Ok(7), "a refused call has no effect");
        // A new store of the same name has the same region, and another key.
        for ask in [
            Ask::DropStore { name: store.name.clone() },
            Ask::CreateStore {
                name: store.name.clone(),
                kind: PLAIN.into(),
                parameters: String::new(),
                quota: store.quota,
            },
        ] {
            let ask = serde_json::to_vec(&ask).expect("plain data");
            client.call(NODE, ServiceId::NODE, &ask, &mut answer).await.expect("the node succeeds");
        }
        refused(ask_to_add(&*client, own, 6).await, "open it again");
        let Ok(Answer::Store(anew)) = serde_json::from_slice(&answer) else { panic!("expected a store") };
        assert_eq!((anew.region, ask_to_add(&*client, key(&anew), 8).await), (store.region, Ok(8)));
    });
}

pub(crate) fn an_unanswered_call_ends_at_its_deadline<R: Rig>(rig: &R, executor: Executor) {
    let (endpoint, store) = rig.client();
    let client = Rc::clone(&endpoint);
    let (name, kind, parameters) = ("late".to_owned(), SLOW.to_owned(), String::new());
    let slow = Ask::CreateStore { name, kind, parameters, quota: store.quota };
    let slow = serde_json::to_vec(&slow).expect("plain data");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let other = rig.connect();
            // Its outcome does not matter; it keeps the node busy.
            let _asked = block_on(&*other, other.call(NODE, ServiceId::NODE, &slow, &mut Vec::new()));
        });
        while !rig.busy().load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
        executor.run(&endpoint, async move {
            let info = serde_json::to_vec(&Ask::NodeInfo).expect("plain data");
            let (since, mut answer) = (Instant::now(), Vec::new());
            let error = client.call(NODE, ServiceId::NODE, &info, &mut answer).await;
            let (error, waited) =
                (error.expect_err("the node is busy beyond the time limit"), since.elapsed());
            assert!(matches!(error, FabricError::Deadline { node: NODE, .. }), "{error:?}");
            assert_eq!(error.ran(), Ran::Unknown);
            assert!((DEADLINE..DEADLINE * 5 / 2).contains(&waited), "{waited:?}");
            // Chains run without the node's thread. The late response must not be taken for that of another call.
            assert_eq!(sum_at(&*client, &store, 8).await, 0);
            client.call(NODE, ServiceId::NODE, &info, &mut answer).await.expect("a valid call");
            assert!(matches!(serde_json::from_slice(&answer), Ok(Answer::NodeInfo(_))));
        });
    });
}

pub(crate) fn a_request_after_an_idle_second_works_and_idling_is_cheap<R: Rig>(rig: &R, executor: Executor) {
    const IDLE: Duration = Duration::from_secs(1);
    let cpu = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).expect("a time");
    let (endpoint, store) = rig.client();
    let client = Rc::clone(&endpoint);
    executor.run(&endpoint, async move {
        let (mut buffer, mut reply, one) = (ChainBuf::new(), Reply::new(), U64::new(1));
        for turn in 0..2 {
            let mut chain = buffer.begin(key(&store));
            let old = chain.also(fetch_add(table(&store, 8), &one));
            carry(&*client, &chain, &mut reply).await;
            assert_eq!(reply.get(old).map(|old| old.get()), Ok(turn));
            if turn > 0 {
                break;
            }
            let before = cpu();
            timer::sleep(IDLE).await;
            let used = cpu() - before;
            assert!(used < IDLE / 2, "an idle endpoint sleeps, but used {used:?}");
        }
    });
}
