//! Replacement of replicas on nodes in this process: recoverers that die or meet between any two of their requests, and
//! clients that act in between.
//!
//! Invariant: the test determines the order of all requests, so a failure is reproducible.

use super::Home;
use super::intercept::Then;
use super::replicas::{ALL, BLOCK, Client, Reach, STORE, Scene, Step, entropy};
use farside_fabrics::executor::{Turns, block_on};
use farside_fabrics::memory::Mapping;
use farside_node::host::Options;
use farside_remote::NodeId;
use farside_remote::control::{Accepted, Answer, Ask, Found, MemberId, MemberState, Membership, Register};
use farside_remote::fabric::Ran;
use farside_systems::blocks::prism_rs::KIND;
use farside_systems::blocks::prism_rs::replace::{ReplaceOptions, Replaced, replace};
use farside_systems::blocks::{Blocks, BlocksError};
use farside_systems::heal::{Healed, heal};
use farside_systems::members::{self, New};
use farside_systems::store::{Loss, Members, StoreError};
use farside_systems::system::Sizing;
use std::cell::Cell;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::task::Poll;
use std::time::Duration;

/// Scenarios that kill mutants, by name. The correct code passes all of them.
pub(crate) const CASES: [(&str, fn()); 8] = [
    ("a_client_that_reaches_nobody_for_a_moment_goes_on", a_client_that_reaches_nobody_for_a_moment_goes_on),
    (
        "a_recoverer_never_proposes_two_lists_with_one_ballot",
        a_recoverer_never_proposes_two_lists_with_one_ballot,
    ),
    ("a_claimed_id_stays_claimed_at_the_next_members", a_claimed_id_stays_claimed_at_the_next_members),
    ("a_wiped_replica_returns_with_what_the_others_have", a_wiped_replica_returns_with_what_the_others_have),
    ("a_wiped_replica_does_not_acknowledge", a_wiped_replica_does_not_acknowledge),
    ("a_write_counts_replicas_of_one_configuration", a_write_counts_replicas_of_one_configuration),
    ("a_write_before_the_revocation_is_kept", a_write_before_the_revocation_is_kept),
    ("a_recoverer_goes_on_with_the_decided_list", a_recoverer_goes_on_with_the_decided_list),
];

/// Gives a node another memory. Clients over these sessions reach the new memory from now on.
pub(crate) fn wipe(scene: &mut Scene, node: u32, reaches: &[&Rc<Reach>]) {
    scene.homes[node as usize] = Home::new(8);
    reaches.iter().for_each(|reach| reach.reopen(&scene.homes[node as usize], node));
}

pub(crate) fn open(scene: &Scene, reach: &Rc<Reach>) -> Result<Members, StoreError> {
    block_on(&**reach, members::open(&**reach, scene.homes.len() as u32, STORE))
}

/// Runs a future to its end. Returns `None` if one of its requests was stopped, and drops it then.
fn until_stuck<O>(reach: &Rc<Reach>, future: impl Future<Output = O>) -> Option<O> {
    reach.is_stuck.set(false);
    let ended = async {
        let mut future = pin!(future);
        std::future::poll_fn(|cx| match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if reach.is_stuck.get() => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        })
        .await
    };
    block_on(&**reach, ended)
}

/// Heals the pool. Returns what was reported; `None` if the recoverer has died.
pub(crate) fn healed(scene: &Scene, reach: &Rc<Reach>) -> Option<Vec<String>> {
    let mut told = Vec::new();
    let tell = |one: Healed| told.push(one.to_string());
    let nodes = scene.homes.len() as u32;
    let seen = until_stuck(reach, heal(&**reach, nodes, None, Duration::ZERO, entropy(), tell))?;
    seen.expect("a node answers");
    Some(told)
}

/// Replaces a member. Returns `None` if the recoverer has died.
pub(crate) fn replaced(
    scene: &Scene,
    reach: &Rc<Reach>,
    index: usize,
    by: u32,
) -> Option<Result<Replaced, StoreError>> {
    let opened = open(scene, reach).expect("the store");
    let options = ReplaceOptions { entropy: entropy(), bytes_per_second: None, progress: &mut |_, _| () };
    until_stuck(reach, replace(&**reach, &opened, index, NodeId(by), options))
}

/// Makes a client of these sessions die at its request number `asks` to a catalog.
fn dies_after(reach: &Reach, asks: u32) {
    let mut left = asks;
    reach.before_each_ask(move |_, _| match left.checked_sub(1) {
        Some(fewer) => {
            left = fewer;
            Then::Runs
        }
        None => Then::Stops,
    });
}

/// Heals a pool of three nodes between two chains of the client `during`. The client is in no turn meanwhile: a
/// revocation waits for turns.
fn heals(during: &Weak<Reach>, recoverer: &Rc<Reach>) {
    end_turn(during);
    let healing = heal(&**recoverer, 3, None, Duration::ZERO, entropy(), drop);
    block_on(&**recoverer, healing).expect("the nodes answer");
}

fn end_turn(of: &Weak<Reach>) {
    of.upgrade().expect("a client runs a chain").end_turn();
}

pub(crate) fn put(client: &mut Client, block: u64, fill: u8) -> Result<(), BlocksError> {
    let reach = Rc::clone(&client.reach);
    block_on(&*reach, client.blocks.write(block, &[fill; BLOCK]))
}

pub(crate) fn get(client: &mut Client, block: u64) -> Result<u8, BlocksError> {
    let reach = Rc::clone(&client.reach);
    let mut bytes = [0xee; BLOCK];
    block_on(&*reach, client.blocks.read(block, &mut bytes))?;
    assert!(bytes.iter().all(|&byte| byte == bytes[0]), "the bytes are of one write: {bytes:?}");
    Ok(bytes[0])
}

/// Numbers of the nodes of the store's members, by index; and of the first node without a member.
fn nodes_of(scene: &Scene) -> (Vec<u32>, u32) {
    let opened = open(scene, &Reach::new(&scene.homes)).expect("the store");
    let nodes: Vec<u32> = opened.list().iter().map(|member| member.node.0).collect();
    let spare = (0..scene.homes.len() as u32).find(|node| !nodes.contains(node));
    (nodes, spare.unwrap_or(u32::MAX))
}

/// The membership that each node holds.
pub(crate) fn memberships(scene: &Scene) -> Vec<Option<Membership>> {
    let of = |home: &Home| match home.ask(Ask::FindStore { name: STORE.into() }) {
        Answer::Found(Found { store, .. }) => store.and_then(|store| store.membership),
        other => panic!("asked for a store, got {other:?}"),
    };
    scene.homes.iter().map(of).collect()
}

/// Checks that all members serve one configuration, whose number is returned, and that no node has another member.
pub(crate) fn check_settled(scene: &Scene, replicas: usize) -> u64 {
    let held: Vec<Membership> = memberships(scene).into_iter().flatten().collect();
    assert_eq!(held.len(), replicas, "{held:?}");
    for of in &held {
        assert_eq!(of.state, MemberState::Committed, "{held:?}");
        assert_eq!((of.configuration, &of.members), (held[0].configuration, &held[0].members));
    }
    held[0].configuration
}

/// Checks that each majority of three replicas reads the same from block 0. Returns that.
fn read_from_all_majorities(scene: &Scene) -> u8 {
    let (nodes, _) = nodes_of(scene);
    let mut first = None;
    for left_out in nodes.iter().copied().cycle().take(6) {
        let mut reader = scene.client();
        reader.before_each(move |node, _| if node == left_out { Then::Stops } else { Then::Runs });
        let got = get(&mut reader, 0).expect("a majority answers");
        assert_eq!(got, *first.get_or_insert(got), "read without node {left_out}");
    }
    first.expect("six reads")
}

/// Writes block 0 such that only a majority has the last write, and all other blocks to 8. Returns the last write.
fn load(scene: &Scene, last_at: [u32; 2]) -> u8 {
    let mut client = scene.client();
    for block in 0..8 {
        assert_eq!(put(&mut client, block, 1 + block as u8), Ok(()));
    }
    client.before_each(move |node, step| {
        let is_reached = step != Step::Installs || last_at.contains(&node);
        if is_reached { Then::Runs } else { Then::Lost(Ran::No) }
    });
    assert_eq!(put(&mut client, 0, 77), Ok(()));
    77
}

fn check_blocks(scene: &Scene, last: u8) {
    let mut reader = scene.client();
    for block in 1..8 {
        assert_eq!(get(&mut reader, block), Ok(1 + block as u8));
    }
    assert_eq!(get(&mut reader, 9), Ok(0), "it was never written");
    assert_eq!(read_from_all_majorities(scene), last);
    let mut writer = scene.client();
    assert_eq!(put(&mut writer, 0, last + 1), Ok(()));
    assert_eq!(get(&mut reader, 0), Ok(last + 1), "a client of before writes on");
    assert_eq!(read_from_all_majorities(scene), last + 1);
}

pub(crate) fn a_wiped_replica_returns_with_what_the_others_have() {
    let mut scene = Scene::new(3);
    let last = load(&scene, [0, 2]);
    wipe(&mut scene, 2, &[]);
    let told = healed(&scene, &Reach::new(&scene.homes)).expect("it lives");
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].contains("replaced member 2, which had lost its memory, by node 2"), "{told:?}");
    assert_eq!(check_settled(&scene, 3), 2);
    check_blocks(&scene, last);
    assert_eq!(healed(&scene, &Reach::new(&scene.homes)), Some(vec![]), "nothing is left to do");
    scene.audit();
}

pub(crate) fn a_wiped_replica_does_not_acknowledge() {
    let mut scene = Scene::new(3);
    let mut client = scene.client();
    assert_eq!(put(&mut client, 0, 1), Ok(()));
    wipe(&mut scene, 2, &[&client.reach]);
    client.before_each(|node, step| match (node, step) {
        (1, Step::Installs) => Then::Lost(Ran::No),
        _ => Then::Runs,
    });
    let unwritten = put(&mut client, 0, 2).expect_err("one replica alone has it");
    assert!(matches!(unwritten, BlocksError::NoMajority { answered: 1, needed: 2, .. }), "{unwritten}");
}

/// A creator sleeps before it decides. Meanwhile another client commits the store and writes it, and the first
/// member is replaced and dropped. The creator then takes the first member's answer for an abort.
pub(crate) fn a_creator_that_sleeps_over_a_replacement_drops_nothing() {
    let scene = Rc::new(Scene { homes: (0..4).map(|_| Home::new(8)).collect() });
    let creator = Reach::new(&scene.homes);
    let (mut is_due, during) = (at_call(0), Rc::clone(&scene));
    creator.before_each_ask(move |_, ask| {
        if matches!(ask, Ask::Decide { .. }) && is_due() {
            let mut writer = during.client();
            assert_eq!(put(&mut writer, 0, 7), Ok(()));
            let (_, spare) = nodes_of(&during);
            let replaced = replaced(&during, &Reach::new(&during.homes), 0, spare).expect("it lives");
            assert_eq!(replaced.expect("all nodes live").configuration, 2);
            assert_eq!(check_settled(&during, 3), 2, "the first member is dropped");
        }
        Then::Runs
    });
    let sizing = Sizing { items: Some(64), value_len: BLOCK, ..Sizing::default() };
    let (name, kind) = (STORE.to_owned(), KIND.to_owned());
    let new = New { name, kind, sizing, quota: 4 << 20, members: 3 };
    let created = block_on(&*creator, members::create(&*creator, 4, &new, [1, 2]));
    assert_eq!(check_settled(&scene, 3), 2, "no member is dropped: {created:?}");
    assert_eq!(read_from_all_majorities(&scene), 7);
    match created {
        Err(StoreError::Fabric(error)) => assert_eq!(error.ran(), Ran::Unknown, "{error}"),
        other => panic!("expected an unknown outcome, got {other:?}"),
    }
}

/// A write is at the replica that is replaced, then at the newcomer: at one replica of each configuration.
pub(crate) fn a_write_counts_replicas_of_one_configuration() {
    let scene = Scene::with_spares(3, 1, 64);
    let (nodes, spare) = nodes_of(&scene);
    let mut client = scene.client();
    assert_eq!(put(&mut client, 0, 1), Ok(()));
    let (recoverer, of_recoverer) = (Reach::new(&scene.homes), open(&scene, &Reach::new(&scene.homes)));
    let of_recoverer = of_recoverer.expect("the store");
    let (mut installs, during) = (vec![0; scene.homes.len()], Rc::downgrade(&client.reach));
    client.before_each(move |node, step| {
        if step != Step::Installs || node == nodes[0] || node == spare {
            return Then::Runs;
        }
        installs[node as usize] += 1;
        if node == nodes[1] && installs[node as usize] == 1 {
            end_turn(&during);
            let options =
                ReplaceOptions { entropy: entropy(), bytes_per_second: None, progress: &mut |_, _| () };
            let replacing = replace(&*recoverer, &of_recoverer, 0, NodeId(spare), options);
            assert_eq!(block_on(&*recoverer, replacing).map(|replaced| replaced.configuration), Ok(2));
        }
        if installs[node as usize] == 1 { Then::Runs } else { Then::Lost(Ran::No) }
    });
    let unwritten = put(&mut client, 0, 2).expect_err("one replica of the configuration has it");
    assert!(matches!(unwritten, BlocksError::NoMajority { answered: 1, needed: 2, .. }), "{unwritten}");
    assert_eq!(unwritten.ran(), Ran::Unknown);
}

/// A write completes just before the first replica is revoked, at the replica that is replaced and one other.
pub(crate) fn a_write_before_the_revocation_is_kept() {
    let scene = Scene::with_spares(3, 1, 64);
    let (nodes, spare) = nodes_of(&scene);
    let mut client = scene.client();
    assert_eq!(put(&mut client, 0, 1), Ok(()));
    let others = [nodes[0], nodes[2]];
    client.before_each(move |node, step| {
        let is_reached = step != Step::Installs || others.contains(&node);
        if is_reached { Then::Runs } else { Then::Lost(Ran::No) }
    });
    let (recoverer, mut client) = (Reach::new(&scene.homes), Some(client));
    recoverer.before_each_ask(move |node, ask| {
        if matches!(ask, Ask::Revoke { .. })
            && nodes.contains(&node)
            && let Some(mut client) = client.take()
        {
            assert_eq!(put(&mut client, 0, 2), Ok(()));
        }
        Then::Runs
    });
    let replaced = replaced(&scene, &recoverer, 2, spare).expect("it lives").expect("all nodes live");
    assert_eq!(replaced.configuration, 2);
    assert_eq!(check_settled(&scene, 3), 2);
    assert_eq!(read_from_all_majorities(&scene), 2);
}

/// Two recoverers choose different newcomers. One decides, and dies before it revokes.
pub(crate) fn a_recoverer_goes_on_with_the_decided_list() {
    let scene = Scene::with_spares(3, 2, 64);
    let (nodes, spare) = nodes_of(&scene);
    let other_spare = (spare + 1..5).find(|node| !nodes.contains(node)).expect("a second spare");
    let (one, other) = (Reach::new(&scene.homes), Reach::new(&scene.homes));
    let (opened, of_nodes) = (open(&scene, &one).expect("the store"), nodes.clone());
    one.before_each_ask(move |node, ask| {
        let is_of_member = matches!(ask, Ask::Revoke { .. }) && of_nodes.contains(&node);
        if is_of_member { Then::Stops } else { Then::Runs }
    });
    let mut one = Some(one);
    other.before_each_ask(move |_, ask| {
        if matches!(ask, Ask::Promise { .. })
            && let Some(one) = one.take()
        {
            let options =
                ReplaceOptions { entropy: entropy(), bytes_per_second: None, progress: &mut |_, _| () };
            assert!(until_stuck(&one, replace(&*one, &opened, 2, NodeId(spare), options)).is_none());
        }
        Then::Runs
    });
    let outcome = replaced(&scene, &other, 2, other_spare).expect("it lives");
    let error = outcome.expect_err("the other newcomer was decided").to_string();
    assert!(error.contains("another replacement was completed first"), "{error}");
    assert_eq!(check_settled(&scene, 3), 2);
    assert_eq!(nodes_of(&scene).0, [nodes[0], nodes[1], spare]);
}

/// A recoverer dies before its n-th request, for each n, and another one completes its work.
pub(crate) fn recoverers_that_die_anywhere_are_completed() {
    let mut is_over = false;
    for asks in 0..200 {
        let mut scene = Scene::new(3);
        let last = load(&scene, [0, 2]);
        wipe(&mut scene, 2, &[]);
        let one = Reach::new(&scene.homes);
        dies_after(&one, asks);
        is_over = healed(&scene, &one).is_some();
        drop(one);
        let told = healed(&scene, &Reach::new(&scene.homes)).expect("it lives");
        assert_eq!(check_settled(&scene, 3), 2, "after {asks} requests: {told:?}");
        check_blocks(&scene, last);
        if is_over {
            assert!(asks > 20, "{asks}");
            break;
        }
    }
    assert!(is_over);
}

/// A member does not answer, and a fourth node replaces it. The recoverer dies before its n-th request, for each n. The
/// next one goes on without that member, whichever it is.
pub(crate) fn a_silent_member_keeps_no_recoverer_from_going_on() {
    for silent in 0..3 {
        let completed = (0..200).map_while(|asks| completes_without(silent, asks)).filter(|is| *is).count();
        assert!(
            completed >= 5,
            "{completed} replacements of member {silent} were completed by the next recoverer"
        );
    }
}

/// Returns whether the next recoverer has completed the replacement of the silent member; `None` if the first one did
/// not die.
fn completes_without(silent: usize, asks: u32) -> Option<bool> {
    let scene = Scene::with_spares(3, 1, 64);
    let (nodes, spare) = nodes_of(&scene);
    let last = load(&scene, [nodes[silent], nodes[(silent + 1) % 3]]);
    let (gone, [one, two]) = (nodes[silent], [(); 2].map(|()| Reach::new(&scene.homes)));
    let opened = open(&scene, &one).expect("the store");
    let mut left = asks;
    one.before_each_ask(move |node, _| match u32::checked_sub(left, 1) {
        _ if node == gone => Then::Lost(Ran::No),
        Some(fewer) => {
            left = fewer;
            Then::Runs
        }
        None => Then::Stops,
    });
    let options = ReplaceOptions { entropy: entropy(), bytes_per_second: None, progress: &mut |_, _| () };
    let is_dead = until_stuck(&one, replace(&*one, &opened, silent, NodeId(spare), options)).is_none();
    drop(one);
    two.before_each_ask(move |node, _| if node == gone { Then::Lost(Ran::No) } else { Then::Runs });
    let told = healed(&scene, &two).expect("it lives");
    assert_eq!(open(&scene, &two).map(drop), Ok(()), "member {silent} is silent, {asks} requests: {told:?}");
    drop(two);
    let is_completed = nodes_of(&scene).0.contains(&spare);
    let told = healed(&scene, &Reach::new(&scene.homes)).expect("it lives");
    assert_eq!(check_settled(&scene, 3), 1 + u64::from(is_completed), "{asks} requests: {told:?}");
    check_blocks(&scene, last);
    is_dead.then_some(is_completed)
}

/// The same with a chain instead of a request, and with a living replica that a fourth node replaces.
pub(crate) fn recoverers_that_die_in_a_copy_are_completed() {
    let mut is_over = false;
    for chains in (0..200).step_by(3) {
        let scene = Scene::with_spares(3, 1, 64);
        let (nodes, spare) = nodes_of(&scene);
        let last = load(&scene, [nodes[0], nodes[2]]);
        let one = Reach::new(&scene.homes);
        let mut left = chains;
        one.before_each_chain(move |_, _| match u32::checked_sub(left, 1) {
            Some(fewer) => {
                left = fewer;
                Then::Runs
            }
            None => Then::Stops,
        });
        is_over = replaced(&scene, &one, 2, spare).is_some();
        drop(one);
        let told = healed(&scene, &Reach::new(&scene.homes)).expect("it lives");
        assert_eq!(check_settled(&scene, 3), 2, "after {chains} chains: {told:?}");
        assert_eq!(nodes_of(&scene).0, [nodes[0], nodes[1], spare]);
        check_blocks(&scene, last);
        if is_over {
            assert!(chains > 10, "{chains}");
            break;
        }
    }
    assert!(is_over);
}

/// A recoverer dies when some members serve the next configuration. The next recoverer enables the others, and drops
/// the replaced member.
pub(crate) fn the_last_member_that_is_enabled_lets_the_replaced_one_go() {
    for enabled in 1..=2 {
        let scene = Scene::with_spares(3, 1, 64);
        let (nodes, spare) = nodes_of(&scene);
        let last = load(&scene, [nodes[0], nodes[2]]);
        let one = Reach::new(&scene.homes);
        let mut left = enabled;
        one.before_each_ask(move |_, ask| match ask {
            Ask::Enable { .. } if left == 0 => Then::Stops,
            Ask::Enable { .. } => {
                left -= 1;
                Then::Runs
            }
            _ => Then::Runs,
        });
        assert!(replaced(&scene, &one, 2, spare).is_none());
        drop(one);
        let held = memberships(&scene);
        let serves = |of: &&Membership| of.configuration == 2 && of.state == MemberState::Committed;
        assert_eq!(held.iter().flatten().filter(serves).count(), enabled, "{held:?}");
        let told = healed(&scene, &Reach::new(&scene.homes)).expect("it lives");
        assert_eq!(check_settled(&scene, 3), 2, "{told:?}");
        check_blocks(&scene, last);
    }
}

/// Returns a function that is true at its call number `nth`. The numbers begin at 0.
fn at_call(nth: u32) -> impl FnMut() -> bool {
    let mut left = Some(nth);
    move || {
        let now = left;
        left = now.and_then(|now| now.checked_sub(1));
        now == Some(0)
    }
}

/// While a recoverer makes its n-th request, another one does all the work.
pub(crate) fn two_recoverers_at_the_same_time_agree() {
    for asks in 0..200u32 {
        let mut scene = Scene::new(3);
        let last = load(&scene, [0, 2]);
        wipe(&mut scene, 2, &[]);
        let (one, other) = (Reach::new(&scene.homes), Reach::new(&scene.homes));
        let (mut is_due, has_met) = (at_call(asks), Rc::new(Cell::new(false)));
        let (met, during) = (Rc::clone(&has_met), Rc::downgrade(&one));
        one.before_each_ask(move |_, _| {
            if is_due() {
                met.set(true);
                heals(&during, &other);
            }
            Then::Runs
        });
        let told = healed(&scene, &one).expect("it lives");
        let rest = healed(&scene, &Reach::new(&scene.homes)).expect("it lives");
        assert_eq!(check_settled(&scene, 3), 2, "after {asks} requests: {told:?} {rest:?}");
        check_blocks(&scene, last);
        if !has_met.get() {
            assert!(asks > 20, "{asks}");
            return;
        }
    }
    panic!("a recoverer makes more than 200 requests");
}

/// While a recoverer makes its n-th request, others replace two members and a client writes. Then the recoverer goes
/// on, with what it knew before.
pub(crate) fn a_recoverer_that_sleeps_over_two_configurations_harms_nobody() {
    let mut longest = 0;
    for asks in 0..200u32 {
        let scene = Scene::with_spares(3, 2, 64);
        let (nodes, spare) = nodes_of(&scene);
        let other_spare = (spare + 1..5).find(|node| !nodes.contains(node)).expect("a second spare");
        load(&scene, [nodes[0], nodes[2]]);
        let (one, other, mut client) = (Reach::new(&scene.homes), Reach::new(&scene.homes), scene.client());
        let of_other = open(&scene, &other).expect("the store");
        let (mut is_due, has_met) = (at_call(asks), Rc::new(Cell::new(false)));
        let (met, during) = (Rc::clone(&has_met), Rc::downgrade(&one));
        one.before_each_ask(move |_, _| {
            if is_due() {
                met.set(true);
                end_turn(&during);
                let healing = heal(&*other, 5, None, Duration::ZERO, entropy(), drop);
                block_on(&*other, healing).expect("the nodes answer");
                let options =
                    ReplaceOptions { entropy: entropy(), bytes_per_second: None, progress: &mut |_, _| () };
                let replacing = replace(&*other, &of_other, 0, NodeId(other_spare), options);
                block_on(&*other, replacing).expect("nobody else replaces a member meanwhile");
                assert_eq!(put(&mut client, 0, 78), Ok(()));
            }
            Then::Runs
        });
        let outcome = replaced(&scene, &one, 2, spare).expect("it lives");
        let told = healed(&scene, &Reach::new(&scene.homes)).expect("it lives");
        let configuration = check_settled(&scene, 3);
        longest = longest.max(configuration);
        assert!((2..=3).contains(&configuration), "after {asks} requests: {outcome:?} {told:?}");
        check_blocks(&scene, if has_met.get() { 78 } else { 77 });
        if !has_met.get() {
            assert!(asks > 20 && longest == 3, "{asks}, {longest}");
            return;
        }
    }
    panic!("a recoverer makes more than 200 requests");
}

/// Members are replaced between a client's read phase and its write phase, or within either.
pub(crate) fn a_client_of_a_former_configuration_goes_on() {
    for (at, reads) in [(Step::Installs, false), (Step::Reads, false), (Step::Reads, true)] {
        let mut scene = Scene::new(3);
        let mut client = scene.client();
        assert_eq!(put(&mut client, 0, 1), Ok(()));
        let before = client.register(0, 0).tag;
        wipe(&mut scene, 2, &[&client.reach]);
        let (mut recoverer, during) = (Some(Reach::new(&scene.homes)), Rc::downgrade(&client.reach));
        client.before_each(move |_, step| {
            if let Some(recoverer) = recoverer.take_if(|_| step == at) {
                heals(&during, &recoverer);
            }
            Then::Runs
        });
        if reads {
            assert_eq!(get(&mut client, 0), Ok(1));
            continue;
        }
        assert_eq!(put(&mut client, 0, 2), Ok(()));
        let mut other = scene.client();
        let after = other.register(0, 0).tag;
        assert_eq!(after.counter(), before.counter() + 1, "one tag for one write");
        assert_eq!(read_from_all_majorities(&scene), 2);
        assert_eq!(check_settled(&scene, 3), 2);
    }
}

/// A client looks at the members while one of them is replaced: the others answer before that, and the replaced one
/// after it was dropped. The client must not take this for the drop of the store.
pub(crate) fn a_member_replaced_during_a_look_is_no_drop() {
    for look in 1..=4 {
        // The first member, whose state tells whether the store exists, is to be asked last.
        let mut scenes = (0..1000).map(|_| Scene::with_spares(3, 1, 64));
        let scene = scenes.find(|scene| nodes_of(scene).1 == 3).expect("a quarter of all stores has it");
        let recoverer = Reach::new(&scene.homes);
        assert!(replaced(&scene, &recoverer, 0, 3).is_some_and(|done| done.is_ok()));
        let last = load(&scene, [1, 3]);
        let (looks, replaced_at) = (Reach::new(&scene.homes), Rc::new(Cell::new(false)));
        let (recoverer, was_replaced) = (Reach::new(&scene.homes), Rc::clone(&replaced_at));
        let opened = open(&scene, &recoverer).expect("the store");
        let (during, mut left) = (Rc::downgrade(&looks), look);
        looks.before_each_ask(move |node, ask| {
            if matches!(ask, Ask::FindStore { .. }) && node == 3 {
                left -= 1;
                if left == 0 {
                    end_turn(&during);
                    let options = ReplaceOptions {
                        entropy: entropy(),
                        bytes_per_second: None,
                        progress: &mut |_, _| (),
                    };
                    let replacing = replace(&*recoverer, &opened, 0, NodeId(0), options);
                    assert_eq!(block_on(&*recoverer, replacing).map(|done| done.configuration), Ok(3));
                    was_replaced.set(true);
                }
            }
            Then::Runs
        });
        let told = healed(&scene, &looks).expect("it lives");
        assert!(replaced_at.get(), "a recoverer looks at least {look} times");
        assert_eq!(check_settled(&scene, 3), 3, "at look {look}: {told:?}");
        check_blocks(&scene, last);
        open(&scene, &looks).expect("the store");
    }
}

/// A client knows one member as lost, and finds another one lost after both were replaced, before it hears of the next
/// configuration.
pub(crate) fn a_client_that_has_missed_two_losses_goes_on() {
    for reads in [true, false] {
        let mut scene = Scene::new(3);
        let mut client = scene.client();
        assert_eq!(put(&mut client, 0, 1), Ok(()));
        for node in [0, 1] {
            wipe(&mut scene, node, &[&client.reach]);
            if node == 0 {
                assert_eq!(get(&mut client, 0), Ok(1), "two replicas answer");
            }
            let told = healed(&scene, &Reach::new(&scene.homes)).expect("it lives");
            assert_eq!(check_settled(&scene, 3), 2 + u64::from(node), "{told:?}");
        }
        // The third member tells later: the pauses between the attempts add up to 63 ms.
        let mut lost = 0;
        client.before_each(move |node, _| match node {
            2 if lost < 6 => {
                lost += 1;
                Then::Lost(Ran::No)
            }
            _ => Then::Runs,
        });
        match reads {
            true => assert_eq!(get(&mut client, 0), Ok(1)),
            false => assert_eq!(put(&mut client, 0, 2), Ok(())),
        }
    }
}

/// Two members are replaced by spare nodes and then wiped, while a client sleeps and the third member cannot be
/// reached. The client then finds both wiped, and the third member, while the nodes that know of the replacements are
/// silent. The client must not take this for the loss of a majority.
pub(crate) fn a_client_that_reaches_no_node_with_news_knows_of_no_loss() {
    let mut scene = Scene::with_spares(3, 2, 64);
    let mut client = scene.client();
    assert_eq!(put(&mut client, 0, 1), Ok(()));
    let recoverer = Reach::new(&scene.homes);
    let (members, _) = nodes_of(&scene);
    let (wiped, third) = ([members[0], members[1]], members[2]);
    let to_third = move |node| if node == third { Then::Lost(Ran::No) } else { Then::Runs };
    recoverer.before_each_ask(move |node, _| to_third(node));
    recoverer.before_each_chain(move |node, _| to_third(node));
    let spares = (0..5).filter(|node| !members.contains(node));
    for (index, spare) in spares.enumerate() {
        let done = replaced(&scene, &recoverer, index, spare);
        assert!(done.as_ref().is_some_and(Result::is_ok), "{done:?}");
    }
    for node in wiped {
        wipe(&mut scene, node, &[&client.reach]);
    }
    let fate = move |node| match node == third || wiped.contains(&node) {
        true => Then::Runs,
        false => Then::Lost(Ran::No),
    };
    client.reach.before_each_ask(move |node, _| fate(node));
    client.before_each(move |node, _| fate(node));
    let error = put(&mut client, 0, 2).expect_err("no majority answers").to_string();
    assert!(!error.contains("has lost the memory"), "{error}");
    client.reach.before_each_ask(|_, _| Then::Runs);
    client.before_each(|_, _| Then::Runs);
    assert_eq!(put(&mut client, 0, 3), Ok(()));
}

/// A client asks a member that has left, and the current members do not answer. One that was replaced before does, and
/// knows of no replacement. The client must not take this for the drop of the store.
pub(crate) fn a_member_that_left_while_the_current_ones_are_silent_is_no_drop() {
    let scene = Scene::with_spares(3, 2, 64);
    let (members, spare) = nodes_of(&scene);
    let (stays, recoverer) = (members[0], Reach::new(&scene.homes));
    recoverer.before_each_ask(move |node, ask| match ask {
        Ask::Leave { .. } if node == stays => Then::Lost(Ran::No),
        _ => Then::Runs,
    });
    assert!(replaced(&scene, &recoverer, 0, spare).is_some_and(|done| done.is_ok()));
    let mut client = scene.client();
    assert_eq!(put(&mut client, 0, 1), Ok(()));
    end_turn(&Rc::downgrade(&client.reach));
    let (members, next) = ([members[1], members[2]], 10 - stays - members[1] - members[2] - spare);
    assert!(replaced(&scene, &recoverer, 0, next).is_some_and(|done| done.is_ok()));
    let held: Vec<bool> = memberships(&scene).iter().map(Option::is_some).collect();
    assert!(held[stays as usize] && !held[spare as usize], "{held:?}");
    let is_silent = move |node| node == next || members.contains(&node);
    let fate = move |node| if is_silent(node) { Then::Lost(Ran::No) } else { Then::Runs };
    client.reach.before_each_ask(move |node, _| fate(node));
    client.before_each(move |node, _| fate(node));
    let error = put(&mut client, 0, 2).expect_err("no majority answers").to_string();
    assert!(!error.contains("dropped"), "{error}");
    client.reach.before_each_ask(|_, _| Then::Runs);
    client.before_each(|_, _| Then::Runs);
    assert_eq!(put(&mut client, 0, 3), Ok(()));
}

/// A client of the next configuration has no key of the newcomer yet, and only the member that was replaced answers.
/// The client must not take the newcomer for lost.
pub(crate) fn a_client_that_reaches_only_a_former_member_knows_of_no_loss() {
    let scene = Scene::with_spares(3, 1, 64);
    let (members, spare) = nodes_of(&scene);
    let (former, down) = (members[1], members[0]);
    let recoverer = Reach::new(&scene.homes);
    let leaves = |ask: &Ask| matches!(ask, Ask::Leave { .. });
    recoverer.before_each_ask(move |_, ask| if leaves(ask) { Then::Lost(Ran::No) } else { Then::Runs });
    assert!(replaced(&scene, &recoverer, 1, spare).is_some_and(|done| done.is_ok()));
    assert!(memberships(&scene)[former as usize].is_some(), "it has not left");
    let reach = Reach::new(&scene.homes);
    let fate = |is_reached| if is_reached { Then::Runs } else { Then::Lost(Ran::No) };
    reach.before_each_ask(move |node, _| fate(node != spare));
    let mut client = scene.client_over(&reach);
    reach.before_each_ask(move |node, _| fate(node == former));
    client.before_each(move |node, _| fate(node == former));
    let error = put(&mut client, 0, 1).expect_err("no majority answers").to_string();
    assert!(!error.contains("lost the memory"), "{error}");
    reach.before_each_ask(move |node, _| fate(node != down));
    client.before_each(move |node, _| fate(node != down));
    assert_eq!(put(&mut client, 0, 2), Ok(()));
}

/// A recoverer finds a member lost, and another one replaces it first. The slower one has nothing to report.
pub(crate) fn a_recoverer_that_another_overtakes_reports_no_loss() {
    for look in 1.. {
        let mut scene = Scene::new(3);
        let last = load(&scene, [0, 2]);
        wipe(&mut scene, 1, &[]);
        let (slow, fast) = (Reach::new(&scene.homes), Reach::new(&scene.homes));
        let (during, has_healed) = (Rc::downgrade(&slow), Rc::new(Cell::new(false)));
        let (mut left, healed_by_fast) = (look, Rc::clone(&has_healed));
        slow.before_each_ask(move |node, ask| {
            if matches!(ask, Ask::FindStore { .. }) && node == 0 {
                left -= 1;
                if left == 0 {
                    heals(&during, &fast);
                    healed_by_fast.set(true);
                }
            }
            Then::Runs
        });
        let told = healed(&scene, &slow).expect("it lives");
        assert!(!told.iter().any(|told| told.contains("not healed")), "at look {look}: {told:?}");
        assert_eq!(check_settled(&scene, 3), 2, "at look {look}: {told:?}");
        check_blocks(&scene, last);
        if !has_healed.get() {
            assert!(look > 3, "a recoverer looks more often");
            break;
        }
    }
}

/// The node of a lost member is kept for that member. If it is at another place of the pool, the recoverer asks.
pub(crate) fn a_lost_member_returns_to_its_own_node_only() {
    let mut scene = Scene::with_spares(3, 1, 64);
    let (members, spare) = nodes_of(&scene);
    let last = load(&scene, [members[0], members[2]]);
    wipe(&mut scene, members[1], &[]);
    let reach = Reach::new(&scene.homes);
    let refused = replaced(&scene, &reach, 0, members[1]).expect("it lives").expect_err("it held member 1");
    assert!(refused.to_string().contains("it probably held member 1"), "{refused}");
    scene.homes.swap(members[0] as usize, members[1] as usize);
    let told = healed(&scene, &Reach::new(&scene.homes)).expect("it lives");
    let asks = "farside volume replace --replica 1 --by";
    assert!(told.len() == 1 && told[0].contains(asks), "{told:?}");
    scene.homes.swap(members[0] as usize, members[1] as usize);
    let told = healed(&scene, &Reach::new(&scene.homes)).expect("it lives");
    assert_eq!(check_settled(&scene, 3), 2, "{told:?}");
    assert!(memberships(&scene)[spare as usize].is_none());
    check_blocks(&scene, last);
}

/// A member has missed the replacement of the first member. The replaced one leaves, to join again in the place of the
/// one that is behind, and its recoverer dies. Whoever reaches these two alone must not take this for a drop.
pub(crate) fn a_member_that_is_behind_is_not_dropped_while_others_are_silent() {
    let scene = Scene::with_spares(3, 1, 64);
    let (nodes, spare) = nodes_of(&scene);
    let (first, behind) = (nodes[0], nodes[1]);
    let last = load(&scene, [first, nodes[2]]);
    let one = Reach::new(&scene.homes);
    one.before_each_ask(move |node, ask| match ask {
        Ask::Enable { .. } if node == behind => Then::Lost(Ran::No),
        _ => Then::Runs,
    });
    let done = replaced(&scene, &one, 0, spare).expect("it lives").expect("a majority serves");
    assert_eq!(done.configuration, 2);
    let two = Reach::new(&scene.homes);
    two.before_each_ask(move |node, ask| match ask {
        _ if node == behind => Then::Lost(Ran::No),
        Ask::PrepareStore { .. } => Then::Stops,
        _ => Then::Runs,
    });
    assert!(replaced(&scene, &two, 1, first).is_none());
    drop(two);
    assert!(memberships(&scene)[first as usize].is_none(), "it has left");
    let three = Reach::new(&scene.homes);
    let is_reached = move |node| node == first || node == behind;
    three.before_each_ask(move |node, _| if is_reached(node) { Then::Runs } else { Then::Lost(Ran::No) });
    let opened = open(&scene, &three);
    let told = healed(&scene, &three).expect("it lives");
    assert!(memberships(&scene)[behind as usize].is_some(), "it is a member: {opened:?}, {told:?}");
    assert!(opened.is_err(), "a majority does not answer: {opened:?}");
    let told = healed(&scene, &Reach::new(&scene.homes)).expect("it lives");
    assert_eq!(check_settled(&scene, 3), 2, "{told:?}");
    check_blocks(&scene, last);
}

/// A client looks for the next configuration, and no node answers it for a moment.
pub(crate) fn a_client_that_reaches_nobody_for_a_moment_goes_on() {
    let mut is_over = false;
    for asks in 0..100 {
        let mut scene = Scene::new(3);
        let mut client = scene.client();
        assert_eq!(put(&mut client, 0, 1), Ok(()));
        wipe(&mut scene, 0, &[&client.reach]);
        healed(&scene, &Reach::new(&scene.homes)).expect("it lives");
        assert_eq!(check_settled(&scene, 3), 2);
        let (counted, before) = (Rc::new(Cell::new(0)), asks);
        let count = Rc::clone(&counted);
        client.reach.before_each_ask(move |_, _| {
            count.set(count.get() + 1);
            let is_lost = (before..before + 3).contains(&(count.get() - 1));
            if is_lost { Then::Lost(Ran::No) } else { Then::Runs }
        });
        assert_eq!(put(&mut client, 0, 2), Ok(()), "without the answers from {asks} on");
        is_over = counted.get() <= asks;
        if is_over {
            assert!(asks > 4, "{asks}");
            break;
        }
    }
    assert!(is_over);
}

/// Clients that claim ids while members are replaced never share one.
pub(crate) fn ids_are_not_claimed_twice_across_configurations() {
    let mut scene = Scene::new(3);
    let (mut first, mut second) = (scene.client(), scene.client());
    wipe(&mut scene, 2, &[&first.reach, &second.reach]);
    let (mut recoverer, during) = (Some(Reach::new(&scene.homes)), Rc::downgrade(&first.reach));
    first.before_each(move |node, step| {
        if let Some(recoverer) = recoverer.take_if(|_| step == Step::Claims && node == 1) {
            heals(&during, &recoverer);
        }
        Then::Runs
    });
    assert_eq!(put(&mut first, 0, 1), Ok(()), "the claim was given up, and the next id was claimed");
    assert_eq!(put(&mut second, 1, 2), Ok(()));
    let mut third = scene.client();
    assert_eq!(put(&mut third, 2, 3), Ok(()));
    let tags = [0, 1, 2].map(|block| scene.client().register(0, block).tag);
    assert!(tags[0] != tags[1] && tags[1] != tags[2] && tags[0] != tags[2], "{tags:?}");
}

/// A claim is known to the replaced member and one other. The newcomer and the third member are a majority, too.
pub(crate) fn a_claimed_id_stays_claimed_at_the_next_members() {
    let mut scene = Scene::new(3);
    let mut first = scene.client();
    first.before_each(|node, _| if node == 1 { Then::Stops } else { Then::Runs });
    assert_eq!(put(&mut first, 0, 1), Ok(()));
    wipe(&mut scene, 2, &[]);
    let told = healed(&scene, &Reach::new(&scene.homes)).expect("it lives");
    assert_eq!(check_settled(&scene, 3), 2, "{told:?}");
    let mut second = scene.client();
    second.before_each(|node, _| if node == 0 { Then::Stops } else { Then::Runs });
    assert_eq!(put(&mut second, 1, 2), Ok(()));
    let mut reader = scene.client();
    let (of_first, of_second) = (reader.register(0, 0).tag, reader.register(1, 1).tag);
    assert_eq!(of_first.counter(), of_second.counter(), "each is the first write of its client");
    assert_ne!(of_first, of_second, "so the ids differ");
}

/// A recoverer proposes two lists, one after the other: when it asks for the second time, the member that has accepted
/// the first list does not answer. The second list is decided, so the next recoverer goes on with it.
pub(crate) fn a_recoverer_never_proposes_two_lists_with_one_ballot() {
    let scene = Scene::with_spares(3, 2, 64);
    let (nodes, spare) = nodes_of(&scene);
    let other_spare = (spare + 1..5).find(|node| !nodes.contains(node)).expect("a second spare");
    let last = load(&scene, [nodes[0], nodes[1]]);
    // Two recoverers have prepared their newcomers, and each has had its list accepted by one member.
    let dead = Reach::new(&scene.homes);
    dead.before_each_ask(|_, ask| if matches!(ask, Ask::Promise { .. }) { Then::Stops } else { Then::Runs });
    assert!(replaced(&scene, &dead, 2, spare).is_none() && replaced(&scene, &dead, 0, other_spare).is_none());
    drop(dead);
    let held = memberships(&scene);
    let list = |node: u32| held[node as usize].clone().expect("a newcomer").members;
    let (attempt, configuration) = ([1, 2], 2);
    let propose = |at: &[u32], ballot, by: u32| {
        for (node, accepts) in at.iter().zip([true, false]) {
            let home = &scene.homes[*node as usize];
            home.ask(Ask::Promise { name: STORE.into(), attempt, configuration, ballot });
            if accepts {
                home.ask(Ask::Accept {
                    name: STORE.into(),
                    attempt,
                    configuration,
                    ballot,
                    members: list(by),
                });
            }
        }
    };
    propose(&[nodes[0], nodes[1]], [1, 20], spare);
    propose(&[nodes[2], nodes[1]], [1, 30], other_spare);
    // Only the third member accepts the first proposal, and does not answer from then on.
    let one = Reach::new(&scene.homes);
    let (is_second, of) = (Rc::new(Cell::new(false)), [nodes[0], nodes[1], nodes[2]]);
    let has_accepted = Rc::clone(&is_second);
    one.answers_instead(move |node, ask| {
        let is_ballot = matches!(ask, Ask::Promise { .. } | Ask::Accept { .. });
        let refuses = node == of[0] && is_ballot && !is_second.get();
        refuses.then(|| Err("too many requests are outstanding".to_owned()))
    });
    one.before_each_ask(move |node, ask| match ask {
        Ask::Revoke { .. } => Then::Stops,
        _ if node == of[2] && has_accepted.get() => Then::Lost(Ran::No),
        Ask::Accept { .. } if node == of[1] && !has_accepted.get() => Then::Lost(Ran::No),
        Ask::Accept { .. } if node == of[2] => {
            has_accepted.set(true);
            Then::Runs
        }
        _ => Then::Runs,
    });
    assert_eq!(healed(&scene, &one), None, "it dies before it revokes");
    drop(one);
    let of_members = nodes.iter().map(|node| {
        match scene.homes[*node as usize].ask(Ask::FindStore { name: STORE.into() }) {
            Answer::Found(found) => found.accepted.expect("each member has accepted a list").members,
            other => panic!("asked for a store, got {other:?}"),
        }
    });
    let of_members: Vec<Vec<MemberId>> = of_members.collect();
    assert_eq!(
        of_members,
        [list(spare), list(spare), list(other_spare)],
        "the first newcomer's list is decided"
    );
    let other = Reach::new(&scene.homes);
    other.before_each_ask(move |node, _| if node == of[0] { Then::Lost(Ran::No) } else { Then::Runs });
    let told = healed(&scene, &other).expect("it lives");
    let serving = memberships(&scene)[nodes[1] as usize].clone().expect("a member");
    assert_eq!((serving.configuration, serving.members), (2, list(spare)), "{told:?}");
    healed(&scene, &Reach::new(&scene.homes)).expect("it lives");
    assert_eq!(check_settled(&scene, 3), 2);
    check_blocks(&scene, last);
}

/// An acceptor answers what no correct acceptor answers. Nothing panics, and nothing is decided by it.
pub(crate) fn impossible_answers_of_an_acceptor_are_not_understood() {
    let mut scene = Scene::new(3);
    let last = load(&scene, [0, 1]);
    wipe(&mut scene, 2, &[]);
    let (attempt, name) = ([1, 2], || STORE.to_owned());
    let Answer::Found(sound) = scene.homes[1].ask(Ask::FindStore { name: name() }) else { panic!("a store") };
    let members = memberships(&scene)[1].clone().expect("a member").members;
    let list = |ballot, members: &[MemberId]| Some(Accepted { ballot, members: members.to_vec() });
    let impossible = [
        Register { promised: [u64::MAX, 0], accepted: None },
        Register { promised: [u64::MAX; 2], accepted: list([u64::MAX; 2], &members) },
        Register { promised: [7, 7], accepted: list([7, 8], &members) },
        Register { promised: [7, 7], accepted: list([0, 0], &members) },
        Register { promised: [7, 7], accepted: list([7, 7], &[]) },
        Register { promised: [7, 7], accepted: list([7, 7], &members.repeat(2)) },
        Register { promised: [7, 7], accepted: list([7, 7], &members[..2]) },
    ];
    for register in impossible {
        let (of_register, found) =
            (register.clone(), Found { accepted: register.accepted.clone(), ..sound.clone() });
        for lies_about_found in [false, true] {
            let (register, found) = (of_register.clone(), found.clone());
            let reach = Reach::new(&scene.homes);
            reach.answers_instead(move |node, ask| match ask {
                Ask::Promise { .. } | Ask::Accept { .. } if node == 1 => {
                    Some(Ok(Answer::Register(register.clone())))
                }
                Ask::FindStore { .. } if node == 1 && lies_about_found => {
                    Some(Ok(Answer::Found(found.clone())))
                }
                _ => None,
            });
            let told = healed(&scene, &reach).expect("it lives").join("; ");
            assert!(told.contains("is not understood"), "{of_register:?}, {lies_about_found}: {told}");
        }
    }
    assert_eq!(memberships(&scene)[0].as_ref().map(|of| (of.configuration, of.attempt)), Some((1, attempt)));
    healed(&scene, &Reach::new(&scene.homes)).expect("it lives");
    assert_eq!(check_settled(&scene, 3), 2);
    check_blocks(&scene, last);
}

pub(crate) fn five_replicas_survive_two_losses_and_two_replacements() {
    let mut scene = Scene::with_spares(5, 1, 64);
    let (nodes, spare) = nodes_of(&scene);
    let mut client = scene.client();
    for block in 0..8 {
        client.reaches(ALL, ALL);
        assert_eq!(put(&mut client, block, 1 + block as u8), Ok(()));
    }
    let has_last = [nodes[0], nodes[3], nodes[4]];
    client.before_each(move |node, step| {
        let is_reached = step != Step::Installs || has_last.contains(&node);
        if is_reached { Then::Runs } else { Then::Lost(Ran::No) }
    });
    assert_eq!(put(&mut client, 0, 77), Ok(()));
    for node in &nodes[3..] {
        wipe(&mut scene, *node, &[&client.reach]);
    }
    let told = healed(&scene, &Reach::new(&scene.homes)).expect("it lives");
    assert_eq!((told.len(), check_settled(&scene, 5)), (2, 3), "{told:?}");
    let recoverer = Reach::new(&scene.homes);
    let outcome = replaced(&scene, &recoverer, 0, spare).expect("it lives").expect("all nodes live");
    assert_eq!((outcome.configuration, check_settled(&scene, 5)), (4, 4));
    for left_out in [[1, 2], [3, 4], [1, 4]] {
        let left_out = left_out.map(|index: usize| nodes[index]);
        let mut reader = scene.client();
        reader.before_each(move |node, _| if left_out.contains(&node) { Then::Stops } else { Then::Runs });
        assert_eq!(get(&mut reader, 0), Ok(77), "without {left_out:?}");
        assert_eq!(get(&mut reader, 5), Ok(6), "without {left_out:?}");
    }
    client.before_each(|_, _| Then::Runs);
    assert_eq!(put(&mut client, 0, 78), Ok(()), "a client that has missed three configurations");
    assert_eq!(get(&mut scene.client(), 0), Ok(78));
}

pub(crate) fn a_lost_majority_is_an_error_and_never_zeros() {
    let mut scene = Scene::new(3);
    let mut client = scene.client();
    assert_eq!(put(&mut client, 0, 1), Ok(()));
    for node in [1, 2] {
        wipe(&mut scene, node, &[&client.reach]);
    }
    let told = healed(&scene, &Reach::new(&scene.homes)).expect("it lives");
    assert!(
        told.iter().all(|told| told.contains("has lost the memory of a majority of its members")),
        "{told:?}"
    );
    assert!(memberships(&scene)[1..].iter().all(Option::is_none), "nobody has joined");
    let unread = get(&mut client, 0).expect_err("a majority is lost");
    let BlocksError::NoMajority { reason, .. } = &unread else { panic!("{unread}") };
    let loss = |error: &BlocksError| match error {
        BlocksError::Store(StoreError::MemoryLost { loss, .. }) => Some(*loss),
        _ => None,
    };
    assert_eq!(loss(reason), Some(Loss::Majority), "{unread}");
}

/// A second member is lost after the first one's revocation, and the recoverer dies: the replaced member is alive.
pub(crate) fn a_member_lost_during_a_replacement_counts_as_one_of_f() {
    let mut scene = Scene::with_spares(3, 1, 64);
    let (nodes, spare) = nodes_of(&scene);
    let last = load(&scene, [nodes[0], nodes[2]]);
    let one = Reach::new(&scene.homes);
    one.before_each_ask(|_, ask| if matches!(ask, Ask::Enable { .. }) { Then::Stops } else { Then::Runs });
    assert!(replaced(&scene, &one, 2, spare).is_none());
    drop(one);
    let refused =
        scene.homes[nodes[0] as usize].host.ask(Ask::OpenStore { name: STORE.into() }, Duration::MAX);
    assert!(refused.expect_err("it is revoked").to_string().contains("is being replaced"));
    wipe(&mut scene, nodes[1], &[]);
    let told = healed(&scene, &Reach::new(&scene.homes)).expect("it lives");
    assert_eq!(check_settled(&scene, 3), 3, "{told:?}");
    check_blocks(&scene, last);
}

pub(crate) fn a_replacement_that_is_not_possible_is_refused() {
    let scene = Scene::with_spares(3, 1, 64);
    let (nodes, spare) = nodes_of(&scene);
    let reach = Reach::new(&scene.homes);
    for (index, by, reason) in
        [(3, spare, "has no member 3: give a number from 0 to 2"), (0, 9, "node 9 does not answer")]
    {
        let refused = replaced(&scene, &reach, index, by).expect("it lives").expect_err(reason).to_string();
        assert!(refused.contains(reason), "{refused}");
    }
    let refused = replaced(&scene, &reach, 0, nodes[1]).expect("it lives").expect_err("it has a member");
    assert!(refused.to_string().contains("it holds member 1 already"), "{refused}");
    let same = replaced(&scene, &reach, 1, nodes[1]).expect("it lives").expect("nothing is to do");
    assert_eq!(same.configuration, 1);
    assert_eq!(check_settled(&scene, 3), 1);
    // A newcomer of a recoverer that died is one for that member only.
    let one = Reach::new(&scene.homes);
    one.before_each_ask(|_, ask| if matches!(ask, Ask::Promise { .. }) { Then::Stops } else { Then::Runs });
    assert!(replaced(&scene, &one, 0, spare).is_none());
    let refused = replaced(&scene, &reach, 1, spare).expect("it lives").expect_err("another member's");
    assert!(refused.to_string().contains("is to replace another member"), "{refused}");
    let told = healed(&scene, &reach).expect("it lives");
    assert!(told.len() == 1 && told[0].contains("replaced member 0 by node"), "{told:?}");
    assert_eq!(check_settled(&scene, 3), 2);
}

/// Between the death of one recoverer and the start of the next, all nodes restart on their memory files.
pub(crate) fn nodes_that_restart_between_two_requests_forget_nothing() {
    let folder = std::env::temp_dir().join(format!("farside-replacing-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for memory files");
    let serve = |name: &str, take_over: bool| {
        let (memory, _) = Mapping::open(&folder.join(name), 8 << 20).expect("a memory file");
        Home::with(memory, Options { take_over, ..Options::default() })
    };
    let mut is_over = false;
    for asks in (0..200).step_by(3) {
        let names: Vec<String> = (0..3).map(|node| format!("{asks}-{node}")).collect();
        let mut scene = Scene::on(names.iter().map(|name| serve(name, false)).collect(), 3, 64);
        let last = load(&scene, [0, 2]);
        let wiped = format!("{asks}-2-wiped");
        scene.homes[2] = serve(&wiped, false);
        let one = Reach::new(&scene.homes);
        dies_after(&one, asks);
        is_over = healed(&scene, &one).is_some();
        drop(one);
        scene.homes.clear();
        for name in [&names[0], &names[1], &wiped] {
            scene.homes.push(serve(name, true));
        }
        let told = healed(&scene, &Reach::new(&scene.homes)).expect("it lives");
        assert_eq!(check_settled(&scene, 3), 2, "after {asks} requests: {told:?}");
        check_blocks(&scene, last);
        if is_over {
            break;
        }
    }
    std::fs::remove_dir_all(&folder).expect("the folder is this test's");
    assert!(is_over);
}

/// The list of a newcomer loses, and its node still is that of a lost member.
pub(crate) fn a_newcomer_whose_list_lost_joins_again() {
    let mut scene = Scene::with_spares(3, 1, 64);
    let (nodes, spare) = nodes_of(&scene);
    let last = load(&scene, [nodes[0], nodes[1]]);
    wipe(&mut scene, nodes[2], &[]);
    let one = Reach::new(&scene.homes);
    one.before_each_ask(|_, ask| if matches!(ask, Ask::Promise { .. }) { Then::Stops } else { Then::Runs });
    assert_eq!(healed(&scene, &one), None);
    let outcome = replaced(&scene, &Reach::new(&scene.homes), 1, spare).expect("it lives");
    assert_eq!(outcome.map(|replaced| replaced.configuration), Ok(2));
    assert!(memberships(&scene)[nodes[2] as usize].is_some(), "the newcomer of the list that lost");
    let told = healed(&scene, &Reach::new(&scene.homes)).expect("it lives");
    assert_eq!(check_settled(&scene, 3), 3, "{told:?}");
    assert_eq!(nodes_of(&scene).0, [nodes[0], spare, nodes[2]]);
    check_blocks(&scene, last);
}

/// The rate limit and the progress of the copy.
pub(crate) fn a_copy_keeps_its_rate_and_reports_progress() {
    use farside_remote::clock::Clock;
    let scene = Scene::with_spares(3, 1, 3000);
    let (_, spare) = nodes_of(&scene);
    let mut client = scene.client();
    for block in 0..400 {
        assert_eq!(put(&mut client, block * 7, 1), Ok(()));
    }
    let reach = Reach::new(&scene.homes);
    let opened = open(&scene, &reach).expect("the store");
    let (before, mut reported) = (reach.now(), Vec::new());
    let options = ReplaceOptions {
        entropy: entropy(),
        bytes_per_second: Some(100 << 10),
        progress: &mut |done, of| reported.push((done, of)),
    };
    let done = block_on(&*reach, replace(&*reach, &opened, 1, NodeId(spare), options)).expect("all live");
    assert_eq!((done.filled.blocks, done.filled.bytes), (400, 400 * BLOCK as u64));
    assert_eq!(done.levelled.blocks, 0, "the pause copies nothing if nobody writes");
    assert_eq!(reported, [(2048, 3000), (3000, 3000)]);
    assert!(
        (reach.now() - before).as_secs_f64() > 1.9,
        "200 KiB at 100 KiB a second: {:?}",
        reach.now() - before
    );
}
