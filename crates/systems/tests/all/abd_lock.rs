//! Tests of ABDLOCK: the scenarios of [`locks`], costs, and clients that die while they hold locks.

use crate::support::locks::{self, BLOCK, BLOCKS, Scene, Step, Then};
use farside_remote::fabric::Ran;
use farside_remote::wire::{ChainHeader, OpHeader};
use farside_systems::blocks::{Blocks, BlocksError};

/// Tests the scenarios of [`locks`] that have these names.
macro_rules! scenarios {
    ($($name:ident),* $(,)?) => {
        $(#[test] fn $name() { locks::$name(); })*
    };
}

scenarios![
    a_write_is_at_a_majority,
    tags_are_read_under_the_locks,
    a_closed_client_frees_its_locks_after_an_outage,
    a_lock_is_freed_after_a_timeout_in_the_same_session,
    a_lock_that_is_granted_late_is_freed,
    a_block_is_not_written_under_a_late_lock,
    a_client_frees_only_its_own_locks,
    a_late_request_for_a_lock_is_freed,
    nobody_reads_the_half_of_a_write,
    a_dropped_operation_frees_its_locks,
    a_write_with_lost_answers_is_completed,
    a_dead_writer_leaves_whole_blocks,
    a_stopped_holder_is_fenced,
    a_fence_counts_at_its_replica_alone,
    the_entry_is_that_of_the_owner,
    a_living_holder_keeps_its_locks,
    a_fenced_client_stays_fenced,
];

#[test]
fn a_block_that_was_never_written_is_zeros() {
    let scene = Scene::new(3);
    let mut client = scene.client();
    assert_eq!((client.read(0), client.read(BLOCKS - 1)), (Ok(0), Ok(0)));
    assert_eq!(client.write(BLOCKS - 1, 9), Ok(()));
    assert_eq!((client.read(BLOCKS - 2), client.read(BLOCKS - 1)), (Ok(0), Ok(9)));
    let beyond = BlocksError::NoSuchBlock { block: BLOCKS, blocks: BLOCKS };
    assert_eq!((client.read(BLOCKS), client.write(BLOCKS, 1)), (Err(beyond.clone()), Err(beyond)));
    assert_eq!(client.blocks.block_len(), BLOCK);
    scene.audit();
}

#[test]
fn an_operation_takes_three_waves_and_with_releases_apart_four() {
    const CHAIN_HEADER: usize = size_of::<ChainHeader>();
    const OP_HEADER: usize = size_of::<OpHeader>();
    /// Bytes of the chains of each phase to one replica.
    const LOCK: usize = CHAIN_HEADER + OP_HEADER + 16;
    const READ: usize = CHAIN_HEADER + OP_HEADER;
    const WRITE: usize = CHAIN_HEADER + OP_HEADER + 8 + BLOCK;
    const FREE: usize = LOCK;
    const WRITE_AND_FREE: usize = WRITE + OP_HEADER + 16;
    for replicas in [3, 5] {
        for releases_apart in [false, true] {
            let scene = Scene::new(replicas);
            let mut client = scene.client_with(releases_apart);
            client.pace();
            let write_waves = if releases_apart { 4 } else { 3 };
            assert_eq!(client.write(0, 1), Ok(()));
            let costs = client.fabric.take();
            assert_eq!(costs.round_trips, 2 + write_waves, "the first one also claims an id, in two waves");
            for turn in 0..3 {
                assert_eq!(client.write(0, turn), Ok(()));
                let (costs, of) = (client.fabric.take(), replicas as u64);
                let bytes = LOCK + READ + if releases_apart { WRITE + FREE } else { WRITE_AND_FREE };
                let expected = (write_waves, of * write_waves, 2 * of, (replicas * bytes) as u64);
                assert_eq!((costs.round_trips, costs.requests, costs.atomics, costs.bytes_out), expected);
                assert_eq!(client.read(0), Ok(turn));
                let costs = client.fabric.take();
                let expected = (3, 3 * of, 2 * of, (replicas * (LOCK + READ + FREE)) as u64);
                assert_eq!((costs.round_trips, costs.requests, costs.atomics, costs.bytes_out), expected);
                assert!(costs.bytes_in as usize >= replicas * BLOCK, "{costs:?}");
            }
        }
    }
}

#[test]
fn a_read_writes_back_what_a_majority_lacks() {
    let scene = Scene::new(3);
    let mut client = scene.client();
    client.reaches(&[0, 1]);
    assert_eq!(client.write(0, 1), Ok(()));
    assert!(scene.look(2, 0).1 < scene.look(1, 0).1);
    assert_eq!(client.read_from(0, &[1, 2]), 1);
    assert_eq!(scene.look(2, 0), scene.look(1, 0), "the read has written it back");
    scene.audit();
}

#[test]
fn two_clients_never_claim_one_id() {
    let scene = Scene::new(3);
    let (mut client, other) = (scene.client(), scene.client());
    let mut other = Some(other);
    client.before_each(move |_, step| {
        // The other client claims the id between this client's look at the ids and its claim.
        if let Some(mut other) = other.take_if(|_| step == Step::Claims) {
            other.before_each(|node, step| match (node, step) {
                (2, Step::Claims) => Then::Lost(Ran::No),
                _ => Then::Runs,
            });
            assert_eq!(other.write(0, 1), Ok(()));
        }
        Then::Runs
    });
    assert_eq!(client.write(0, 2), Ok(()));
    assert_eq!(client.read(0), Ok(2));
    let mut third = scene.client();
    assert_eq!(third.read(0), Ok(2));
    scene.audit();
}

#[test]
fn a_dead_holder_of_a_majority_blocks_its_block_alone() {
    let scene = Scene::new(3);
    let (mut client, mut other) = (scene.client(), scene.client());
    assert_eq!((client.write(1, 1), other.write(2, 2)), (Ok(()), Ok(())));
    client.before_each(|node, step| match (node, step) {
        (2, Step::Locks) => Then::Lost(Ran::No),
        (_, Step::Reads) => Then::Stops,
        _ => Then::Runs,
    });
    assert!(!client.drop_write(0, 1, 10));
    client.die();
    assert_eq!(scene.locked(0), [0, 1]);
    let write = other.write(0, 2).expect_err("a dead client holds a majority");
    let read = other.read(0).expect_err("a dead client holds a majority");
    for error in [read, write] {
        assert!(matches!(error, BlocksError::Locked { block: 0, client: 1, .. }), "{error:?}");
        assert_eq!(error.ran(), Ran::No);
        println!("{error}");
    }
    assert_eq!(scene.locked(0), [0, 1], "the others have freed what they were granted");
    assert_eq!((other.write(1, 3), other.read(1)), (Ok(()), Ok(3)), "other blocks can be used");
}

#[test]
fn a_dead_holder_of_a_minority_blocks_nothing() {
    let scene = Scene::new(3);
    let (mut client, mut other) = (scene.client(), scene.client());
    assert_eq!((client.write(1, 1), other.write(2, 2)), (Ok(()), Ok(())));
    client.before_each(|node, step| match (node, step) {
        (1 | 2, Step::Locks) => Then::Stops,
        _ => Then::Runs,
    });
    assert!(!client.drop_write(0, 1, 10));
    client.die();
    assert_eq!(scene.locked(0), [0]);
    for turn in 0..3 {
        assert_eq!((other.write(0, turn), other.read(0)), (Ok(()), Ok(turn)));
    }
    assert_eq!(scene.locked(0), [0]);
}

#[test]
fn a_client_whose_task_does_not_run_says_so() {
    let scene = Scene::new(3);
    let mut client = scene.client();
    let mut unkept = scene.client();
    assert_eq!(client.write(0, 1), Ok(()));
    unkept.stop_keeping();
    let error = unkept.read(0).expect_err("nobody carries out the operation");
    assert_eq!(error, BlocksError::NotKept { ran: Ran::No });
    println!("{error}");
}
