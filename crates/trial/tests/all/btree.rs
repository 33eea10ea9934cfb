//! The B-tree on latched objects: whole trials of each scheme, puts whose futures are dropped at each of their steps,
//! and the round trips of a lookup.

use farside_sim::fault::Fault;
use farside_sim::nic::Device;
use farside_sim::world::{Nanos, SECONDS, World, within};
use farside_systems::latch::btree::Btree;
use farside_systems::latch::scheme::Steps;
use farside_systems::latch::{Placement, Scheme, Spec};
use farside_systems::system::{Backoff, Options};
use farside_trial::judge::{Verdict, judge};
use farside_trial::latches::{self, AT_ONCE, Bench, FLIGHT};
use farside_trial::{Setup, System};
use std::time::Duration;

const ROUND_TRIP: Nanos = 2 * FLIGHT;
/// Seeds of each scheme in every run of the tests.
const SEEDS: u64 = 12;
/// Entries of a node of the chosen schedules.
const ENTRIES: usize = 3;

fn btree() -> System {
    System::named("btree").expect("trees can be tried")
}

#[test]
fn trials_of_all_schemes_are_good() {
    let (mut operations, mut torn) = (0, 0);
    let mut struck = [Fault::ClientDeath, Fault::Reset, Fault::Delay].map(|fault| (fault, 0));
    for (place, (name, scheme)) in (0..).zip(Scheme::ALL) {
        let setup = Setup { scheme: Some(scheme), ..Setup::of(btree()) };
        for seed in place * SEEDS..(place + 1) * SEEDS {
            let judged = judge(&setup, seed, true);
            assert_eq!(judged.verdict, Verdict::Good, "{name}: {judged}");
            let report = judged.report.expect("it did not panic");
            operations += report.record.operations();
            torn += report.seen.torn_reads;
            struck.iter_mut().for_each(|(fault, count)| *count += report.struck.of(*fault));
        }
    }
    println!("{operations} operations, {torn} torn READs, {struck:?}");
    // Otherwise the trials have tested nothing.
    assert!(operations > 100 * Scheme::ALL.len() * SEEDS as usize && torn > 300, "{operations}, {torn}");
    assert!(struck.iter().all(|(_, count)| *count > 100), "{struck:?}");
}

/// A world with a tree, in which operations take no time but for the flight of their verbs.
struct Stage {
    world: World,
    spec: Spec,
    connect: Box<dyn Fn() -> farside_sim::fabric::verbs::Verbs>,
}

type Tree = Btree<farside_sim::fabric::verbs::Verbs>;

impl Stage {
    fn new(bench: &Bench, scheme: Scheme) -> Stage {
        let len = (24 + 16 * ENTRIES) as u32;
        let spec =
            Spec { objects: 40, len, scheme, placement: Placement::Inline, relaxed: false, lease: None };
        let (world, nic) = bench.world(1, AT_ONCE, &spec);
        let device = Device { timing: AT_ONCE, has_masked_cas: false, has_on_chip_words: false };
        let theirs = world.clone();
        Stage { world, spec, connect: Box::new(move || latches::connect(&theirs, &nic, device)) }
    }

    /// Opens another client, whose task runs.
    async fn open(&self) -> Tree {
        let first = Duration::from_nanos(ROUND_TRIP);
        let options =
            Options { entropy: 1, backoff: Some(Backoff { first, longest: 16 * first }), ..Options::NONE };
        let latched = latches::open((self.connect)(), &self.spec, &options).await;
        let keeper = latched.keeper();
        self.world.spawn(self.world.start_process(), async move {
            keeper.await.expect("the NIC executes every verb");
        });
        Btree::new(latched).expect("the objects are long enough")
    }
}

/// Pairs of a tree, with space between the keys.
fn pairs(count: u64) -> Vec<(u64, u64)> {
    (0..count).map(|number| (10 * number + 10, number)).collect()
}

/// Awaited round trips of a read by a scheme.
fn round_trips(scheme: Scheme) -> u64 {
    match (scheme.name(), scheme.steps) {
        ("v2" | "v2-footer", _) => 3,
        _ if scheme.is_optimistic() => 2,
        (_, Steps::Basic) => 3,
        (_, Steps::Speculative | Steps::Overlapped) => 2,
        (_, Steps::Async | Steps::Unlatch) => 1,
    }
}

#[test]
fn a_lookup_awaits_the_round_trips_of_its_scheme_for_each_level() {
    let bench = Bench::default();
    for (name, scheme) in Scheme::ALL {
        for levels in 1..=3 {
            let stage = Stage::new(&bench, scheme);
            let world = stage.world.clone();
            let done = world.complete(SECONDS, async move {
                let mut tree = stage.open().await;
                let pairs = pairs((ENTRIES as u64).pow(levels));
                tree.load(&pairs, ENTRIES).await.expect("it fits");
                for (key, value) in pairs {
                    let since = stage.world.now();
                    assert_eq!(tree.get(key).await, Ok(Some(value)), "{name}");
                    let took = (stage.world.now() - since) / ROUND_TRIP;
                    assert_eq!(took, u64::from(levels) * round_trips(scheme), "{name}, {levels} levels");
                    tree.settle().await.expect("the NIC executes every verb");
                    let since = stage.world.now();
                    assert_eq!(tree.get_unsynchronized(key).await, Ok(Some(value)), "{name}");
                    assert_eq!((stage.world.now() - since) / ROUND_TRIP, u64::from(levels), "{name}");
                }
            });
            assert_eq!(done, Some(()), "{name}");
            world.end();
        }
    }
}

/// Outcome of a put whose future was dropped.
struct Dropped {
    has_ended: bool,
    is_stored: bool,
    /// Whether a lookup of the put's key, or of a key beside it, had to move right.
    has_moved: bool,
}

/// Puts a key into a tree of full leaves with `count` pairs, drops the put's future after `ns` nanoseconds, and checks
/// what another client finds: before and after it puts the same key.
fn drop_put(bench: &Bench, scheme: Scheme, count: u64, ns: Nanos) -> Dropped {
    const NEW: u64 = 25;
    let stage = Stage::new(bench, scheme);
    let world = stage.world.clone();
    let done = world.complete(SECONDS, async move {
        let (mut tree, mut other) = (stage.open().await, stage.open().await);
        let mut pairs = pairs(count);
        tree.load(&pairs, ENTRIES).await.expect("it fits");
        let put = within(&stage.world, ns, tree.put(NEW, 99)).await;
        let has_ended = put.is_some();
        put.into_iter().for_each(|put| assert_eq!(put, Ok(()), "{scheme}"));
        stage.world.sleep(100 * ROUND_TRIP).await; // Until the client's task has released the latches.
        let found = other.get(NEW).await.expect("no latch is held");
        assert!([None, Some(99)].contains(&found), "{scheme}: {found:?}");
        let is_stored = found.is_some();
        let mut has_moved = false;
        for turn in 0..2 {
            let stored = is_stored.then_some((NEW, 99));
            let mut expected: Vec<(u64, u64)> = pairs.iter().copied().chain(stored).collect();
            expected.sort_unstable();
            expected.dedup();
            assert_eq!(other.scan(0, usize::MAX).await, Ok(expected.clone()), "{scheme}, after {ns} ns");
            let mut took = Vec::new();
            for &(key, value) in &expected {
                other.settle().await.expect("the NIC executes every verb");
                let since = stage.world.now();
                assert_eq!(other.get(key).await, Ok(Some(value)), "{scheme}, after {ns} ns");
                took.push(stage.world.now() - since);
                assert_eq!(other.get(key + 1).await, Ok(None), "{scheme}, after {ns} ns");
            }
            // All lookups take equally long, unless some move right.
            let moves = took.iter().any(|ns| *ns != took[0]);
            if turn > 0 {
                assert!(!moves, "{scheme}, after {ns} ns: a parent still lacks an entry: {took:?}");
                break;
            }
            has_moved = moves;
            // The other client puts the same again, and adds what parents lack.
            for (key, value) in expected.into_iter().chain([(NEW, 99)]) {
                assert_eq!(other.put(key, value).await, Ok(()), "{scheme}, after {ns} ns");
            }
            pairs.push((NEW, 99));
        }
        Dropped { has_ended, is_stored, has_moved }
    });
    world.end();
    done.unwrap_or_else(|| panic!("{scheme}, after {ns} ns: an operation does not end"))
}

#[test]
fn every_key_is_found_after_a_put_was_dropped_at_any_step() {
    let bench = Bench::default();
    for (name, scheme) in Scheme::ALL {
        // With 9 pairs, the root must be split; with 18, a leaf and its parent.
        for count in [9, 18] {
            let (mut absent, mut stored, mut moved) = (0, 0, 0);
            for step in 0.. {
                let dropped = drop_put(&bench, scheme, count, step * FLIGHT + FLIGHT / 2);
                absent += u32::from(!dropped.is_stored);
                stored += u32::from(dropped.is_stored);
                moved += u32::from(dropped.has_moved);
                if dropped.has_ended {
                    break;
                }
                assert!(step < 200, "{name}: the put does not end");
            }
            println!(
                "{name}, {count} pairs: {absent} steps before the put took effect, {stored} after it, {moved} moved"
            );
            assert!(absent > 5 && stored > 3 && moved > 0, "{name}: {absent}, {stored}, {moved}");
        }
    }
}
