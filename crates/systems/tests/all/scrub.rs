//! Tests of the comparison of replicas, and of the repair of those that are behind.

use crate::support::intercept::Then;
use crate::support::replicas::{BLOCKS, Scene, Step};
use farside_remote::fabric::Ran;
use farside_systems::blocks::{Blocks, BlocksError, Scrubbed};

/// What a scrub reports if these replicas were behind.
fn behind(replicas: &[u32]) -> Result<Scrubbed, BlocksError> {
    Ok(Scrubbed { behind: replicas.to_vec(), ..Scrubbed::default() })
}

#[test]
fn a_replica_that_is_behind_gets_the_newest_write() {
    for (replicas, majority, minority) in [(3, &[0, 1][..], &[2][..]), (5, &[0, 1, 2], &[3, 4])] {
        let scene = Scene::new(replicas);
        let mut client = scene.client();
        assert_eq!(client.scrub(0), behind(&[]), "no replica has a write");
        assert_eq!(client.put(2, 9), Ok(()));
        assert_eq!(client.scrub(2), behind(&[]), "a put reaches all replicas that answer");
        for (block, fill) in [(0, 1), (0, 2), (1, 3)] {
            assert_eq!(client.put_at(majority, block, fill), Ok(()));
            assert_eq!(client.scrub(block), behind(minority));
            let newest = client.register(0, block).tag;
            assert!((1..replicas).all(|replica| client.register(replica, block).tag == newest));
            assert_eq!(client.scrub(block), behind(&[]), "it is repaired");
            assert_eq!(client.get(block), Ok(fill));
        }
        scene.audit();
    }
}

#[test]
fn a_write_that_only_one_replica_has_is_completed() {
    let scene = Scene::new(3);
    let mut client = scene.client();
    assert_eq!(client.put(0, 1), Ok(()));
    client.reaches(&[0, 1, 2], &[2]);
    client.drop_put(0, 2);
    client.reaches(&[0, 1, 2], &[0, 1, 2]);
    assert_eq!(client.scrub(0), behind(&[0, 1]));
    assert_eq!(client.get_from(0, &[0, 1]), 2);
    scene.audit();
}

#[test]
fn a_difference_that_a_second_look_does_not_show_is_a_write_in_flight() {
    let scene = Scene::new(3);
    let mut client = scene.client();
    let mut writer = client.another();
    writer.reaches(&[0, 1, 2], &[2]);
    writer.drop_put(0, 2);
    writer.reaches(&[0, 1, 2], &[0, 1, 2]);
    // Before the second look the write is everywhere.
    let mut looks = 0;
    client.before_each(move |node, step| {
        assert_eq!(step, Step::Reads, "nothing is repaired");
        looks += u32::from(node == 0);
        if (node, looks) == (0, 2) {
            assert_eq!(writer.scrub(0), behind(&[0, 1]));
        }
        Then::Runs
    });
    assert_eq!(client.scrub(0), behind(&[]));
}

#[test]
fn other_bytes_under_one_tag_are_reported_and_stay() {
    let scene = Scene::new(3);
    let mut client = scene.client();
    assert_eq!((client.put(0, 1), client.scrub(0)), (Ok(()), behind(&[])));
    client.damage(1, 0);
    let damaged = Ok(Scrubbed { damaged: vec![1], ..Scrubbed::default() });
    assert_eq!(client.scrub(0), damaged);
    assert_eq!(client.scrub(0), damaged);
    assert_eq!(client.put(0, 2), Ok(()), "a write replaces the bytes");
    assert_eq!(client.scrub(0), behind(&[]));
}

#[test]
fn a_replica_that_does_not_answer_is_left_out() {
    let scene = Scene::new(3);
    let mut client = scene.client();
    assert_eq!((client.put(0, 1), client.scrub(0)), (Ok(()), behind(&[])));
    client.before_each(|node, _| if node == 1 { Then::Lost(Ran::No) } else { Then::Runs });
    assert_eq!(client.scrub(0), Ok(Scrubbed { silent: vec![1], ..Scrubbed::default() }));
    client.before_each(|node, _| if node > 0 { Then::Lost(Ran::No) } else { Then::Runs });
    let error = client.scrub(0).expect_err("one replica is no majority");
    assert!(matches!(error, BlocksError::NoMajority { answered: 1, needed: 2, .. }), "{error}");
    let beyond = BlocksError::NoSuchBlock { block: BLOCKS, blocks: BLOCKS };
    assert_eq!(client.scrub(BLOCKS), Err(beyond));
}

#[test]
fn a_thread_has_room_for_the_futures_of_many_operations() {
    const MOST: usize = 64 << 10;
    let scene = Scene::new(5);
    let mut client = scene.client();
    let mut bytes = [0; 512];
    let read = size_of_val(&client.blocks.read(0, &mut bytes));
    let write = size_of_val(&client.blocks.write(0, &bytes));
    let scrub = size_of_val(&client.blocks.scrub(0));
    assert!(read < MOST && write < MOST && scrub < MOST, "{read}, {write} and {scrub} bytes");
}
