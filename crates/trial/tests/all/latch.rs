//! Latched objects: many short random schedules of each scheme, the adversarial schedules of the literature, broken
//! schemes, and the round trips of each operation.

use farside_remote::{Addr, ChainBuf, Fabric, Key, NodeId, Reply, read, write};
use farside_sim::nic::{Device, Step};
use farside_sim::world::{Nanos, SECONDS, within};
use farside_systems::latch::scheme::{Steps, Word};
use farside_systems::latch::{LatchError, Placement, Scheme, Spec};
use farside_systems::system::{Backoff, Options};
use farside_trial::latches::{self, AT, AT_ONCE, Bench, Chosen, Does, FLIGHT, Late, Outcome};
use std::cell::{Cell, RefCell};
use std::num::NonZero;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Number of random schedules of each scheme, in every run of the tests and in the long one.
const SCHEDULES: u64 = 10_000;
const SOAK_SCHEDULES: u64 = 10_000_000;
const SCHEMES: u64 = Scheme::ALL.len() as u64;
/// Time for which a client tries to take a latch.
const PATIENCE: Duration = Duration::from_millis(10);
/// Latency of a round trip of the chosen schedules.
const ROUND_TRIP: Nanos = 2 * FLIGHT;
/// Pauses between attempts to take a latch that a dropped operation holds.
const BACKOFF: Backoff =
    Backoff { first: Duration::from_nanos(ROUND_TRIP), longest: Duration::from_micros(16) };
/// Lateness of a step that waits for another client's whole operation.
const LATE: Nanos = 20 * ROUND_TRIP;

fn scheme(name: &str) -> Scheme {
    Scheme::named(name).expect("a scheme")
}

/// Runs `each` schedules of each scheme, on all CPUs, and returns the totals. No two schemes share a seed.
fn run_schedules(each: u64) -> Outcome {
    let all = Mutex::new(Outcome::default());
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let place = next.fetch_add(1, Ordering::Relaxed)
                    && let Some((name, _)) = Scheme::ALL.get(place)
                {
                    let first = place as u64 * each;
                    let totals = run_scheme(name, first..first + each);
                    add(&mut all.lock().expect("no thread has failed"), &totals);
                }
            });
        }
    });
    all.into_inner().expect("no thread has failed")
}

/// Runs the schedules of these seeds of the scheme with this name, and returns their totals.
fn run_scheme(name: &str, seeds: Range<u64>) -> Outcome {
    let (began, mut totals) = (Instant::now(), Outcome::default());
    let (bench, scheme) = (Bench::default(), scheme(name));
    for seed in seeds.clone() {
        let outcome = bench.run(scheme, seed);
        assert!(outcome.violated.is_empty(), "{name}, seed {seed}: {outcome:?}");
        add(&mut totals, &outcome);
    }
    let Outcome { operations, retries, torn_reads, dropped, events, .. } = &totals;
    println!(
        "{name}: seeds {seeds:?}, {operations} operations, {dropped} dropped, {retries} retries, \
         {torn_reads} torn READs, {events} events, {:.1} s",
        began.elapsed().as_secs_f64()
    );
    totals
}

fn add(totals: &mut Outcome, outcome: &Outcome) {
    totals.operations += outcome.operations;
    totals.retries += outcome.retries;
    totals.torn_reads += outcome.torn_reads;
    totals.dropped += outcome.dropped;
    totals.events += outcome.events;
}

#[test]
fn ten_thousand_schedules_of_each_scheme_are_good() {
    let totals = run_schedules(SCHEDULES);
    let schedules = SCHEDULES * SCHEMES;
    // Otherwise the schedules have tested nothing.
    assert!(totals.torn_reads > schedules / 10 && totals.retries > schedules, "{totals:?}");
    assert!(totals.dropped > schedules / 10, "{totals:?}");
}

/// Makes a long test of each scheme, so that the harness runs them on all CPUs, and any of them alone.
macro_rules! soaks {
    ($($test:ident: $scheme:literal),* $(,)?) => {
        const SOAKED: &[&str] = &[$($scheme),*];

        $(
            #[test]
            #[ignore = "takes 12 minutes: cargo xtask soak"]
            fn $test() {
                let seeds = SCHEDULES * SCHEMES..SCHEDULES * SCHEMES + SOAK_SCHEDULES;
                run_scheme($scheme, seeds);
            }
        )*
    };
}

soaks! {
    soak_schedules_of_basic: "basic",
    soak_schedules_of_speculative: "speculative",
    soak_schedules_of_overlapped: "overlapped",
    soak_schedules_of_async: "async",
    soak_schedules_of_unlatch: "unlatch",
    soak_schedules_of_basic_rw: "basic-rw",
    soak_schedules_of_speculative_rw: "speculative-rw",
    soak_schedules_of_overlapped_rw: "overlapped-rw",
    soak_schedules_of_async_rw: "async-rw",
    soak_schedules_of_v2: "v2",
    soak_schedules_of_v2_footer: "v2-footer",
    soak_schedules_of_crc: "crc",
    soak_schedules_of_crc_footer: "crc-footer",
    soak_schedules_of_versions: "versions",
    soak_schedules_of_versions_footer: "versions-footer",
}

#[test]
fn each_scheme_has_a_long_test() {
    assert_eq!(SOAKED, Scheme::ALL.map(|(name, _)| name));
}

/// Parameters of a store with one object, whose latch is in the object.
fn spec(name: &str, len: u32) -> Spec {
    Spec { objects: 1, len, scheme: scheme(name), placement: Placement::Inline, relaxed: false, lease: None }
}

/// Makes the given steps late, each once, by the given times. The steps are in the order in which they occur.
fn once(late: Vec<(Step, Nanos)>) -> Late {
    let mut left = late;
    Box::new(move |step| match left.iter().position(|(waited, _)| *waited == step) {
        Some(place) => left.remove(place).1,
        None => 0,
    })
}

/// A1: the second line of an object is read before an update, and the first line after it.
fn lines_of_two_versions(name: &str) -> Outcome {
    let operations = vec![(0, Does::Adds(0)), (4 * ROUND_TRIP, Does::Reads), (6 * ROUND_TRIP, Does::Adds(0))];
    let seen = Rc::new(Cell::new(0));
    // The first operation fetches the line, too.
    let late: Late = Box::new(move |step| {
        let is_first_line = step == Step::Fetch(AT);
        seen.set(seen.get() + u32::from(is_first_line));
        if is_first_line && seen.get() == 2 { LATE } else { 0 }
    });
    Bench::default().run_chosen(Chosen { spec: spec(name, 104), operations, late, seed: 1 })
}

/// A2: the first and the last line of an object are read before an update, and the line between them after it.
fn an_old_header_and_footer(name: &str) -> Outcome {
    let operations = vec![(0, Does::Adds(0)), (4 * ROUND_TRIP, Does::Reads), (6 * ROUND_TRIP, Does::Adds(0))];
    let seen = Rc::new(Cell::new(0));
    let late: Late = Box::new(move |step| {
        let is_between = step == Step::Fetch(AT + 64);
        seen.set(seen.get() + u32::from(is_between));
        if is_between && seen.get() == 2 { LATE } else { 0 }
    });
    Bench::default().run_chosen(Chosen { spec: spec(name, 136), operations, late, seed: 1 })
}

/// A3: of two READs, the second one is executed around an update, and the first one after both.
fn reads_in_the_other_order() -> Outcome {
    let operations = vec![(0, Does::Reads), (2 * ROUND_TRIP, Does::Adds(0))];
    // The first READ is that of version and latch, and the second one that of the content, in two lines.
    let late = once(vec![(Step::Fetch(AT), 2 * LATE), (Step::Fetch(AT + 64), LATE)]);
    Bench::default().run_chosen(Chosen { spec: spec("v2", 104), operations, late, seed: 1 })
}

/// A4: a reader's atomic fetches the latch before a WRITE releases it, and writes it back after.
fn an_atomic_around_the_unlatch() -> Outcome {
    let operations = vec![(0, Does::Adds(4 * ROUND_TRIP)), (2 * ROUND_TRIP, Does::ReadsShared(0))];
    let latch = AT + 104;
    let seen = Rc::new(Cell::new(0));
    // The first atomic is the writer's.
    let late: Late = Box::new(move |step| {
        let is_atomic = step == Step::WriteBack(latch);
        seen.set(seen.get() + u32::from(is_atomic));
        if is_atomic && seen.get() == 2 { LATE } else { 0 }
    });
    Bench::default().run_chosen(Chosen { spec: spec("unlatch", 104), operations, late, seed: 1 })
}

/// A5: a writer releases the latch between a reader's failed attempt and the reader's compensation.
fn a_release_before_the_compensation() -> Outcome {
    let held = 10 * ROUND_TRIP;
    // The writer has the latch from one round trip on. The reader's attempt arrives before the release, and the
    // compensation after it.
    let reads_at = ROUND_TRIP + held - ROUND_TRIP * 3 / 4;
    let operations = vec![(0, Does::Adds(held)), (reads_at, Does::ReadsShared(0))];
    Bench::default().run_chosen(Chosen {
        spec: spec("overlapped-rw", 16),
        operations,
        late: once(vec![]),
        seed: 1,
    })
}

/// A6: the line with the latch lands before the other lines of the WRITE that releases the latch, and the next holder
/// reads in between.
fn an_unlatch_out_of_order(seed: u64) -> Outcome {
    let operations = vec![(0, Does::Adds(0)), (4 * ROUND_TRIP, Does::Adds(0))];
    let spec = Spec { relaxed: true, ..spec("unlatch", 104) };
    let late = once(vec![(Step::Land(AT), LATE)]);
    Bench::default().run_chosen(Chosen { spec, operations, late, seed })
}

/// A7: a client takes a latch that nobody holds.
fn a_latch_without_contention() -> Outcome {
    let operations = vec![(0, Does::Adds(0)), (20 * ROUND_TRIP, Does::Adds(0))];
    Bench::default().run_chosen(Chosen {
        spec: spec("unlatch", 104),
        operations,
        late: once(vec![]),
        seed: 1,
    })
}

#[test]
fn correct_schemes_survive_the_adversarial_schedules() {
    for name in ["v2", "crc", "versions", "v2-footer", "crc-footer", "versions-footer"] {
        let outcome = lines_of_two_versions(name);
        assert!(outcome.violated.is_empty(), "A1, {name}: {outcome:?}");
        let outcome = an_old_header_and_footer(name);
        assert!(outcome.violated.is_empty(), "A2, {name}: {outcome:?}");
    }
    for name in ["crc", "versions"] {
        let outcome = lines_of_two_versions(name);
        assert!(outcome.retries > 0 && outcome.torn_reads > 0, "A1, {name}: {outcome:?}");
    }
    let outcome = an_old_header_and_footer("versions");
    assert!(outcome.retries > 0 && outcome.torn_reads > 0, "A2: {outcome:?}");
    for (which, outcome) in [
        ("A3", reads_in_the_other_order()),
        ("A4", an_atomic_around_the_unlatch()),
        ("A5", a_release_before_the_compensation()),
        ("A7", a_latch_without_contention()),
    ] {
        assert!(outcome.violated.is_empty(), "{which}: {outcome:?}");
    }
    for seed in 1..=20 {
        let outcome = an_unlatch_out_of_order(seed);
        assert!(outcome.violated.is_empty(), "A6: {outcome:?}");
    }
}

/// Drops an operation after this time, by a client whose task runs. Returns what another operation of the client, by
/// another handle, then finds: the first byte of the object, which the dropped one changes to 1.
fn found_after_a_drop(scheme: Scheme, after: Nanos) -> Result<u8, LatchError> {
    let spec =
        Spec { objects: 1, len: 104, scheme, placement: Placement::Inline, relaxed: false, lease: None };
    let (world, nic) = Bench::default().world(1, AT_ONCE, &spec);
    let device = Device { timing: AT_ONCE, has_masked_cas: false, has_on_chip_words: false };
    let (fabric, theirs) = (latches::connect(&world, &nic, device), world.clone());
    let done = world.complete(SECONDS, async move {
        let options = Options { backoff: Some(BACKOFF), patience: Some(PATIENCE), ..Options::NONE };
        let mut latched = latches::open(fabric, &spec, &options).await;
        let keeper = latched.keeper();
        theirs
            .spawn(theirs.start_process(), async move { keeper.await.expect("the NIC executes every verb") });
        let mut other = latched.another();
        let body = async |content: &mut [u8]| {
            theirs.sleep(ROUND_TRIP).await;
            content[0] = 1;
        };
        let _ended = within(&theirs, after, latched.with_exclusive(0, body)).await;
        let found = other.with_exclusive(0, async |content| content[0]).await;
        other.settle().await.expect("the NIC executes every verb");
        found
    });
    world.end();
    done.expect("the operations end")
}

#[test]
fn a_dropped_operation_releases_its_latch_and_changes_all_or_nothing() {
    for (name, scheme) in Scheme::ALL {
        let found: Vec<_> = (0..24).map(|step| found_after_a_drop(scheme, 1 + step * FLIGHT / 2)).collect();
        assert!(found.iter().all(|found| *found == Ok(0) || *found == Ok(1)), "{name}: {found:?}");
        assert!(found.is_sorted_by_key(|found| found.clone().ok()), "{name}: {found:?}");
        assert_eq!((&found[0], &found[23]), (&Ok(0), &Ok(1)), "{name}");
    }
}

/// Starts two keepers of a client, kills the one with the index `killed`, and drops an operation that holds the latch.
/// Returns the outcome of the client's next operation, and whether all keepers that were left have ended.
fn with_two_keepers(killed: Option<usize>) -> (Result<(), LatchError>, bool) {
    let spec = Spec { objects: 1, ..spec("basic", 104) };
    let (world, nic) = Bench::default().world(1, AT_ONCE, &spec);
    let device = Device { timing: AT_ONCE, has_masked_cas: false, has_on_chip_words: false };
    let (fabric, theirs) = (latches::connect(&world, &nic, device), world.clone());
    let done = world.complete(SECONDS, async move {
        let options = Options { backoff: Some(BACKOFF), ..Options::NONE };
        let mut latched = latches::open(fabric, &spec, &options).await;
        let running = Rc::new(Cell::new(0));
        let keepers = [(); 2].map(|()| {
            let (process, keeper, running) = (theirs.start_process(), latched.keeper(), Rc::clone(&running));
            running.set(running.get() + 1);
            theirs.spawn(process, async move {
                keeper.await.expect("the NIC executes every verb");
                running.set(running.get() - 1);
            });
            process
        });
        theirs.sleep(ROUND_TRIP).await;
        if let Some(killed) = killed {
            theirs.kill(keepers[killed]);
            running.set(running.get() - 1);
        }
        let mut other = latched.another();
        let holds = latched.with_exclusive(0, async |_| theirs.sleep(SECONDS).await);
        assert_eq!(within(&theirs, 4 * ROUND_TRIP, holds).await, None);
        let found = other.with_exclusive(0, async |_| ()).await;
        drop(other);
        drop(latched);
        theirs.sleep(100 * ROUND_TRIP).await;
        (found, running.get() == 0)
    });
    world.end();
    done.expect("the operations end")
}

#[test]
fn of_two_keepers_one_releases_latches_also_if_the_other_is_dropped() {
    for killed in [None, Some(0), Some(1)] {
        assert_eq!(with_two_keepers(killed), (Ok(()), true), "killed: {killed:?}");
    }
}

/// S1: a writer fills a block with one version after the other, and readers look for a higher version behind a lower
/// one in the block. Returns the number of such READs.
fn blocks_with_newer_ends(len: u64, seed: u64) -> u64 {
    const KEY: Key = Key::new(1, 1);
    let timing = farside_sim::nic::Timing { fetch_spread_ns: 60, land_spread_ns: 60, ..AT_ONCE };
    let device = Device { timing, has_masked_cas: false, has_on_chip_words: false };
    let (world, nic) = Bench::default().world(seed, timing, &spec("basic", 16));
    let (writer, reader) = (latches::connect(&world, &nic, device), latches::connect(&world, &nic, device));
    world.spawn(world.start_process(), async move {
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        for version in 1..=100u64 {
            let block = version.to_le_bytes().repeat(len as usize / 8);
            let mut chain = buffer.begin(KEY);
            chain.also(write(Addr::new(AT), &block));
            writer.run(NodeId(0), &chain, &mut reply).await.expect("the NIC executes every verb");
        }
    });
    let done = world.complete(SECONDS, async move {
        let (mut buffer, mut reply, mut found) = (ChainBuf::new(), Reply::new(), 0);
        for _ in 0..100 {
            let mut chain = buffer.begin(KEY);
            let block = chain.also(read(Addr::new(AT), len as u32));
            reader.run(NodeId(0), &chain, &mut reply).await.expect("the NIC executes every verb");
            let block = reply.get(block).expect("the NIC permits everything");
            let versions: Vec<u64> = block
                .chunks_exact(8)
                .map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes")))
                .collect();
            found += u64::from(versions.windows(2).any(|pair| pair[0] < pair[1]));
        }
        found
    });
    world.end();
    done.expect("the readers end")
}

#[test]
fn plain_reads_of_blocks_see_old_headers_before_newer_data() {
    let found =
        [64, 128, 512, 2048].map(|len| (1..=10).map(|seed| blocks_with_newer_ends(len, seed)).sum::<u64>());
    println!("of 1000 READs of 64, 128, 512 and 2048 bytes, {found:?} saw a newer line after an older one");
    assert_eq!(found[0], 0, "a line is whole");
    assert!(found[1] > 0 && found[2] > found[1], "{found:?}");
}

/// What an operation of a single client awaits.
#[derive(Clone, Copy)]
enum Awaited {
    Exclusive,
    Shared,
    Read,
}

/// Returns the numbers of round trips that four successive operations of one client await.
fn round_trips(scheme: Scheme, awaited: Awaited) -> Vec<f64> {
    let spec =
        Spec { objects: 4, len: 200, scheme, placement: Placement::Inline, relaxed: false, lease: None };
    let (world, nic) = Bench::default().world(1, AT_ONCE, &spec);
    let device = Device { timing: AT_ONCE, has_masked_cas: false, has_on_chip_words: false };
    let fabric = latches::connect(&world, &nic, device);
    let (theirs, trips) = (world.clone(), Rc::new(RefCell::new(Vec::new())));
    let found = Rc::clone(&trips);
    let done = world.complete(SECONDS, async move {
        let mut latched = latches::open(fabric, &spec, &Options::NONE).await;
        for object in 0..4 {
            let since = theirs.now();
            match awaited {
                Awaited::Exclusive => latched.with_exclusive(object, async |content| content[0] += 1).await,
                Awaited::Shared => latched.with_shared(object, async |_| ()).await,
                Awaited::Read => latched.read(object, &mut [0; 200]).await,
            }
            .expect("nobody holds the latch");
            found.borrow_mut().push((theirs.now() - since) as f64 / ROUND_TRIP as f64);
        }
        latched.settle().await.expect("the NIC executes every verb");
    });
    assert_eq!(done, Some(()));
    world.end();
    trips.take()
}

#[test]
fn each_operation_awaits_the_round_trips_of_its_scheme() {
    for (name, scheme) in Scheme::ALL {
        let exclusive = match scheme.steps {
            Steps::Basic => 4.0,
            Steps::Speculative => 3.0,
            Steps::Overlapped => 2.0,
            Steps::Async | Steps::Unlatch => 1.0,
        };
        assert_eq!(round_trips(scheme, Awaited::Exclusive), [exclusive; 4], "{name}: exclusive");
        // Only a reader/writer latch has a shared mode.
        assert_eq!(scheme.has_shared_mode(), scheme.word == Word::ReaderWriter);
        let shared = match scheme.steps {
            Steps::Basic => 3.0,
            Steps::Speculative | Steps::Overlapped => 2.0,
            Steps::Async | Steps::Unlatch => 1.0,
        };
        assert_eq!(round_trips(scheme, Awaited::Shared), [shared; 4], "{name}: shared");
        let reads = match name {
            "v2" | "v2-footer" => 3.0,
            "crc" | "crc-footer" | "versions" | "versions-footer" => 2.0,
            _ => shared,
        };
        assert_eq!(round_trips(scheme, Awaited::Read), [reads; 4], "{name}: read");
    }
    assert!(!scheme("unlatch").has_shared_mode());
}

#[cfg(farside_mutants)]
mod broken {
    use super::*;
    use farside_remote::mutant::Mutant;
    use farside_systems::latch::mutants::{
        ALL, DROPPED_KEEPS_LATCH, HEADER_AND_FOOTER, NAIVE_READ, READ_OVER_RESULT, READS_OVERLAP,
        RELEASED_BY_WRITE, UNLATCH_OUT_OF_ORDER, UNLATCH_UNDER_FAA,
    };

    /// Each broken scheme, and the correct scheme from which it differs by one line.
    const NEIGHBOURS: [(Mutant, &str); 8] = [
        (NAIVE_READ, "crc"),
        (HEADER_AND_FOOTER, "versions"),
        (READS_OVERLAP, "v2"),
        (UNLATCH_UNDER_FAA, "unlatch"),
        (RELEASED_BY_WRITE, "overlapped-rw"),
        (UNLATCH_OUT_OF_ORDER, "unlatch"),
        (READ_OVER_RESULT, "unlatch"),
        (DROPPED_KEEPS_LATCH, "basic"),
    ];
    /// Largest number of schedules that it takes to catch a broken scheme.
    const SCHEDULES_MAX: u64 = 1_000;

    fn with<T>(mutant: Mutant, run: impl FnOnce() -> T) -> T {
        Mutant::switch(Some(mutant));
        let done = run();
        Mutant::switch(None);
        done
    }

    #[test]
    fn each_broken_scheme_is_caught_under_schedules_that_its_neighbour_survives() {
        let bench = Bench::default();
        assert!(ALL.iter().all(|mutant| NEIGHBOURS.iter().any(|(listed, _)| listed == mutant)));
        let mut alive = Vec::new();
        for (mutant, neighbour) in NEIGHBOURS {
            let caught = |seed: &u64| {
                let broken = with(mutant, || bench.run(scheme(neighbour), *seed));
                let right = bench.run(scheme(neighbour), *seed);
                assert!(right.violated.is_empty(), "{neighbour}, seed {seed}: {right:?}");
                broken.violated.first().map(|violation| (*seed, violation.clone()))
            };
            match (1..=SCHEDULES_MAX).find_map(|seed| caught(&seed)) {
                Some((seed, why)) => println!("{mutant:?}, as {neighbour}: caught by schedule {seed}: {why}"),
                None => alive.push(mutant),
            }
        }
        assert!(alive.is_empty(), "not caught by {SCHEDULES_MAX} schedules: {alive:?}");
    }

    #[test]
    fn each_adversarial_schedule_catches_its_broken_scheme() {
        let caught = |which: &str, outcome: Outcome| {
            println!("{which}: {:?}", outcome.violated);
            assert!(!outcome.violated.is_empty(), "{which}: {outcome:?}");
        };
        caught("A1", with(NAIVE_READ, || lines_of_two_versions("crc")));
        caught("A2", with(HEADER_AND_FOOTER, || an_old_header_and_footer("versions")));
        caught("A3", with(READS_OVERLAP, reads_in_the_other_order));
        caught("A4", with(UNLATCH_UNDER_FAA, an_atomic_around_the_unlatch));
        caught("A5", with(RELEASED_BY_WRITE, a_release_before_the_compensation));
        // The order in which the two lines land depends on the seed.
        let out_of_order =
            || (1..=20).map(an_unlatch_out_of_order).find(|outcome| !outcome.violated.is_empty());
        caught("A6", with(UNLATCH_OUT_OF_ORDER, out_of_order).unwrap_or_default());
        caught("A7", with(READ_OVER_RESULT, a_latch_without_contention));
        let dropped = with(DROPPED_KEEPS_LATCH, || found_after_a_drop(scheme("basic"), 2 * ROUND_TRIP));
        assert_eq!(dropped, Err(LatchError::Busy));
    }
}
