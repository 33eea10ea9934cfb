//! Tests that the predictions of the papers' figures meet their conditions, and do not depend on the number of
//! simulated operations.

use farside::figure::{FIGURES, Figure, draw};
use farside_bench::workload::Lengths;
use farside_predict::{Bed, Load, Variant};
use farside_sim::hardware::{INPUTS, Inputs, Platform, Testbed};
use farside_systems::latch::{Latching, Placement, Scheme};
use farside_systems::system::Backoff;
use std::time::Duration;

/// Number of simulated operations per point of a curve under load.
const OPERATIONS: u64 = 8_000;

fn assert_met(name: &str) {
    assert_predicted(name, OPERATIONS, 5);
}

/// Predicts a figure. At least `judged_min` rows must have a condition, and all conditions must be met.
fn assert_predicted(name: &str, operations: u64, judged_min: usize) {
    let figure = Figure::named(name).expect("the figure exists");
    let prediction = figure.predict(operations).expect("nothing fails");
    println!("{}", prediction.table());
    assert!(prediction.is_met());
    let judged = prediction.rows.iter().filter(|row| row.is_met().is_some()).count();
    assert!(judged >= judged_min, "{judged} rows are judged");
    let picture = &prediction.picture;
    let lines = picture.csv().lines().count();
    let points = picture.curves.iter().map(|curve| curve.published.len() + curve.here.len());
    assert_eq!(lines, 1 + points.sum::<usize>());
    assert_eq!(prediction.json().lines().count(), prediction.rows.len());
    assert!(draw::svg(picture).starts_with("<svg"));
}

#[test]
fn prism_figure_1_is_reproduced() {
    assert_met("prism-1");
}

#[test]
fn prism_figure_2_is_predicted() {
    assert_met("prism-2");
}

#[test]
fn prism_figure_3_is_predicted() {
    assert_met("prism-3");
}

#[test]
fn prism_figure_4_is_predicted() {
    assert_met("prism-4");
}

#[test]
#[ignore = "takes minutes: cargo xtask soak"]
fn soak_prism_figures_6_and_7_are_predicted() {
    assert_predicted("prism-6", OPERATIONS, 1);
    assert_predicted("prism-7", OPERATIONS, 1);
}

/// Measures ABDLOCK's latency in figure 7 with other pauses between its attempts, those of the code among them. The
/// figure has those that serve ABDLOCK best.
#[test]
#[ignore = "takes minutes: cargo xtask soak"]
fn soak_no_other_pauses_serve_abdlock_better() {
    const PAUSES_US: [[u64; 2]; 7] =
        [[0, 0], [5, 5], [5, 10_000], [20, 20], [20, 320], [20, 10_000], [80, 10_000]];
    for platform in [Platform::Rdma, Platform::PrismSw] {
        let mut of_figure = [0.0; 3];
        let mut others = Vec::new();
        let given = PAUSES_US.map(|pauses| Some(pauses.map(Duration::from_micros)));
        for pauses in given.into_iter().chain([None]) {
            let mut variant = Variant::RELEASES_APART;
            if let Some([first, longest]) = pauses {
                variant.options.backoff = Some(Backoff { first, longest });
            }
            let load = Load { system: "abd-lock", variant, platform, ..LOAD };
            let latencies = [0.0, 0.9, 1.2].map(|skew| {
                let bed = Bed::new(Load { skew, ..load }, 1).expect("the store is created");
                bed.measure(100, OPERATIONS).map_or(f64::INFINITY, |measured| measured.mean_us)
            });
            println!("{}, pauses {pauses:?}: {latencies:.1?} us at 0, 0.9 and 1.2", platform.name());
            match pauses {
                None => of_figure = latencies,
                Some(_) => others.push(latencies),
            }
        }
        let sum = |latencies: &[f64; 3]| latencies.iter().sum::<f64>();
        let best = others.iter().map(sum).fold(f64::INFINITY, f64::min);
        assert!(sum(&of_figure) < 1.1 * best, "{}: {of_figure:?}, and {best} is possible", platform.name());
    }
}

#[test]
fn chequers_reads_per_get_are_those_of_linear_probing() {
    assert_predicted("chequer-blocks", OPERATIONS, 3);
}

/// The curves of figures 7 and 8 are long; `cargo xtask soak` predicts them.
#[test]
fn chequers_modes_of_a_put_are_predicted() {
    let figure = Figure::named("chequer-modes").expect("the figure exists");
    let prediction = figure.predict(1_000).expect("nothing fails");
    println!("{}", prediction.table());
    let of = |mode: &str| {
        let rows = prediction.rows.iter().filter(|row| row.curve == mode);
        rows.filter_map(|row| row.predicted).collect::<Vec<f64>>()
    };
    let [one, two] = [of("mode 1"), of("mode 2")];
    assert_eq!([one.len(), two.len()], [7, 7]);
    for (one, two) in one.iter().zip(&two) {
        // Mode 2 has three waves, and mode 1 copies the value once more.
        assert!(*two > 1.5 * one, "mode 2 has three waves: {two} and {one} us");
    }
    assert!(one.is_sorted() && two.is_sorted(), "long values take longer: {one:?} and {two:?}");
}

#[test]
#[ignore = "takes minutes: cargo xtask soak"]
fn soak_chequers_figures_are_predicted() {
    for name in ["chequer-7", "chequer-8", "chequer-open"] {
        let figure = Figure::named(name).expect("the figure exists");
        let prediction = figure.predict(OPERATIONS).expect("nothing fails");
        println!("{}", prediction.table());
        assert!(prediction.is_met());
    }
}

/// An idle core that sleeps has to be woken, and a busy one does not sleep.
#[test]
fn events_cost_a_wake_up_while_the_node_is_idle() {
    let load = Load { system: "pilaf", platform: Platform::Rdma, reads: 0.0, ..LOAD };
    let [polling, sleeping] = [Variant::OURS, Variant::EVENTS].map(|variant| {
        let testbed = Testbed { cores: 1, ..load.testbed };
        Bed::new(Load { variant, testbed, ..load }, 1).expect("the store is created")
    });
    let [alone, woken] = [&polling, &sleeping].map(|bed| bed.measure(1, 400).expect("nothing fails").mean_us);
    assert!(
        (woken - alone - INPUTS.wake_ns as f64 / 1e3).abs() < 0.01,
        "{alone} us, {woken} us with a wake-up"
    );
    let [busy, also] =
        [&polling, &sleeping].map(|bed| bed.measure(64, 4_000).expect("nothing fails").ops_per_s);
    assert!((also / busy - 1.0).abs() < 0.02, "{busy} a second, {also} with events");
}

#[test]
fn synchronization_section_4_is_reproduced() {
    assert_met("synchronization-4");
}

#[test]
fn synchronizations_atomics_are_reproduced() {
    assert_met("synchronization-atomics");
    assert_predicted("synchronization-padding", OPERATIONS, 4);
}

#[test]
#[ignore = "takes minutes: cargo xtask soak"]
fn soak_synchronizations_schemes_are_predicted() {
    for (name, judged) in [
        ("synchronization-latches", 3),
        ("synchronization-optimistic", 2),
        ("synchronization-sizes", 0),
        ("synchronization-zipf", 0),
        ("synchronization-btree", 1),
    ] {
        assert_predicted(name, OPERATIONS, judged);
    }
}

/// Predicts a figure. Returns the conditions that are not met, and the claims that do not hold.
fn missed(figure: &'static Figure, operations: u64) -> Vec<String> {
    let prediction = figure.predict(operations).expect("nothing fails");
    println!("{}", prediction.table());
    assert!(draw::svg(&prediction.picture).starts_with("<svg"));
    let rows = prediction.rows.iter().filter(|row| row.is_met() == Some(false));
    let claims = prediction.claims.iter().filter(|claim| !claim.holds);
    let rows = rows.map(|row| format!("{}, {}", row.curve, row.point));
    rows.chain(claims.map(|claim| claim.what.to_owned())).collect()
}

/// What SMART's figures miss. The guide has the reasons.
const SMART_MISSES: [(&str, &[&str]); 3] = [
    ("smart-3-bytes", &["ART, 32 + 64 B"]),
    (
        "smart-11",
        &[
            "SMART / Sherman, A, peak",
            "SMART / ART, A, peak",
            "on A, SMART is faster than ART, and ART faster than Sherman",
            "on A and B, ART's 99th percentile at the peak is higher than SMART's",
        ],
    ),
    ("smart-15", &["on C, read delegation beats 90 M/s"]),
];

fn missed_of_smart(name: &str) -> &'static [&'static str] {
    SMART_MISSES.into_iter().find(|(figure, _)| *figure == name).map_or(&[], |(_, missed)| missed)
}

#[test]
fn the_bytes_that_smart_and_its_rivals_read_are_predicted() {
    let figure = Figure::named("smart-3-bytes").expect("the figure exists");
    assert_eq!(missed(figure, 1_000), missed_of_smart(figure.name));
}

/// Not all published numbers are met, and no others are missed than those that the guide explains.
#[test]
#[ignore = "takes minutes: cargo xtask soak"]
fn soak_smarts_figures_are_predicted() {
    for figure in FIGURES.into_iter().filter(|figure| figure.name.starts_with("smart-")) {
        assert_eq!(missed(figure, 20_000), missed_of_smart(figure.name), "{}", figure.name);
    }
}

#[test]
fn fassts_shared_queue_pairs_are_predicted() {
    assert_predicted("fasst-sharing", 1_000, 1);
}

#[test]
#[ignore = "takes minutes: cargo xtask soak"]
fn soak_fassts_case_against_reads_is_predicted() {
    for (name, judged) in
        [("fasst-rpc-read", 2), ("fasst-qps", 2), ("fasst-doorbell", 0), ("fasst-doorbell-rate", 0)]
    {
        assert_predicted(name, 1_000, judged);
    }
}

/// The published rates are from memory of the paper, so none is judged.
#[test]
#[ignore = "takes minutes: cargo xtask soak"]
fn soak_fassts_transactions_are_predicted() {
    for name in ["fasst-tatp", "fasst-smallbank", "fasst-scale"] {
        assert_predicted(name, 1_000, 0);
    }
}

/// The speedups of the figures differ from the ratios of round trips, since verbs do not take equally long. If they do,
/// and checksums take no time, then the speedups are these ratios.
#[test]
fn one_worker_takes_the_time_of_its_round_trips() {
    let inputs = Inputs { pcie_ns: 0, atomic_ns: 0, slot_ns: 0, crc_ps: 0, ..INPUTS };
    let schemes = [
        ("basic", 0.0, 4.0),
        ("speculative", 0.0, 3.0),
        ("overlapped", 0.0, 2.0),
        ("async", 0.0, 1.0),
        ("unlatch", 0.0, 1.0),
        ("basic-rw", 1.0, 3.0),
        ("speculative-rw", 1.0, 2.0),
        ("overlapped-rw", 1.0, 2.0),
        ("async-rw", 1.0, 1.0),
        ("v2", 1.0, 3.0),
        ("crc", 1.0, 2.0),
        ("versions", 1.0, 2.0),
    ];
    let verb_us = inputs.verb_ns as f64 / 1e3;
    for (name, reads, round_trips) in schemes {
        let latching = Latching { scheme: Scheme::named(name), placement: Placement::Padded };
        let variant = Variant { latching, ..Variant::OURS };
        let (testbed, records) = (Testbed::SYNCHRONIZATION, Some(1_000));
        let load = Load { system: "latch", platform: Platform::Rdma, value_len: 256, skew: 0.0, ..LOAD };
        let load = Load { variant, testbed, inputs, reads, records, ..load };
        let measured = Bed::new(load, 1).and_then(|bed| bed.measure(1, 400)).expect("nothing fails");
        let trips = measured.mean_us / verb_us;
        println!("{name}: {:.3} us, as long as {trips:.2} verbs", measured.mean_us);
        assert!((trips / round_trips - 1.0).abs() < 0.15, "{name}: {trips}, and not {round_trips}");
    }
}

/// With 512 workers, the NIC of each of the four machines has 128 connections.
#[test]
fn workers_lose_speed_where_their_nics_do_not_cache_all_connections() {
    let rate = |qp_cache: usize, workers: u32| {
        let latching = Latching { scheme: Scheme::named("basic"), placement: Placement::Padded };
        let variant = Variant { latching, ..Variant::OURS };
        let inputs = Inputs { qp_cache, ..INPUTS };
        let (testbed, records) = (Testbed::SYNCHRONIZATION, Some(200_000));
        let load = Load { system: "latch", platform: Platform::Rdma, value_len: 256, skew: 0.0, ..LOAD };
        let load = Load { variant, testbed, inputs, reads: 0.0, records, ..load };
        let measured = Bed::new(load, 1).and_then(|bed| bed.measure(workers, 20_000));
        let rate = measured.expect("nothing fails").ops_per_s / 1e6;
        println!("{qp_cache} connections cached, {workers} workers: {rate:.2} M/s");
        rate
    };
    let few = rate(INPUTS.qp_cache, 128);
    assert!(rate(INPUTS.qp_cache, 512) < 0.6 * few, "half of the connections are cached");
    assert!(rate(127, 512) < 0.6 * few, "by turns, one too few is as bad");
    let all = rate(128, 512);
    assert!((all / few - 1.0).abs() < 0.02, "{all}, and {few} of 128 workers");
}

const LOAD: Load = Load {
    system: "prism-kv",
    variant: Variant::OURS,
    platform: Platform::PrismSw,
    testbed: Testbed::PRISM_APPLICATIONS,
    inputs: INPUTS,
    reads: 0.5,
    keys: 1,
    value_len: 512,
    lengths: Lengths::Constant,
    skew: 0.0,
    records: None,
    cached: 0,
};

#[test]
fn four_times_as_many_operations_measure_the_same() {
    for clients in [1, 160] {
        let [few, many] = [OPERATIONS, 4 * OPERATIONS].map(|operations| {
            Bed::new(LOAD, 1).and_then(|bed| bed.measure(clients, operations)).expect("nothing fails")
        });
        let ratio = many.ops_per_s / few.ops_per_s;
        assert!((0.98..=1.02).contains(&ratio), "{clients} clients: {few:?}, then {many:?}");
    }
}

/// Both measurements take seconds of virtual time: one has a single client, the other a full link.
#[test]
fn a_measurement_waits_for_all_of_its_operations() {
    let slow =
        Load { testbed: Testbed { link_gbit: 1, ..LOAD.testbed }, reads: 0.0, value_len: 32 << 10, ..LOAD };
    for (clients, operations) in [(1, 5_000), (8, 10_000)] {
        let measured =
            Bed::new(slow, 1).and_then(|bed| bed.measure(clients, operations)).expect("they complete");
        assert!(operations as f64 > measured.ops_per_s, "they take more than a second: {measured:?}");
    }
}

/// A changed input of the model changes the predictions, so a reader who doubts an input can try another value.
#[test]
fn predictions_depend_on_the_inputs() {
    let peak = |load: Load| {
        let curve = Bed::new(load, 1).and_then(|bed| bed.curve(2_000)).expect("nothing fails");
        curve.into_iter().map(|at| at.ops_per_s).fold(0.0, f64::max)
    };
    let usual = peak(LOAD);
    let half_the_link = Testbed { link_gbit: 20, ..Testbed::PRISM_APPLICATIONS };
    let slow_cores = Inputs { core_message_ns: 4 * INPUTS.core_message_ns, ..INPUTS };
    let ratio = peak(Load { testbed: half_the_link, ..LOAD }) / usual;
    assert!((0.45..=0.55).contains(&ratio), "the link is the bottleneck: {ratio}");
    let ratio =
        peak(Load { testbed: Testbed { cores: 4, ..LOAD.testbed }, inputs: slow_cores, ..LOAD }) / usual;
    assert!(ratio < 0.3, "the few slow cores are the bottleneck: {ratio}");
}

/// A variant changes the model's setup, so its prediction differs.
#[test]
fn a_variant_is_predicted_with_its_own_setup() {
    let slow = Variant { name: "slow", setup: |setup| setup.inputs.core_message_ns *= 4, ..Variant::OURS };
    let [usual, slow] = [LOAD, Load { variant: slow, ..LOAD }]
        .map(|load| Bed::new(load, 1).and_then(|bed| bed.measure(1, 2_000)).expect("nothing fails").mean_us);
    assert!(slow > usual, "{slow} us, and {usual} us");
}

#[test]
fn a_nic_without_prism_operations_refuses_chains() {
    let refused =
        Bed::new(Load { platform: Platform::Rdma, ..LOAD }, 1).err().expect("RDMA has no conditional ops");
    assert!(refused.contains("lacks conditional ops"), "{refused}");
}

const BLOCKS: Load = Load { system: "prism-rs", ..LOAD };
/// ABDLOCK over the verbs of the NIC.
const LOCKED: Load =
    Load { system: "abd-lock", variant: Variant::RELEASES_APART, platform: Platform::Rdma, ..LOAD };

/// The headlines of figures 6 and 7, at one number of clients each. The model has no formula for contention: clients
/// wait because the protocol makes them.
#[test]
fn replicated_blocks_are_faster_without_locks_and_skew_slows_only_those_with_locks() {
    let mut beds = [BLOCKS, LOCKED].map(|load| Bed::new(load, 1).expect("the store is created"));
    // A GET takes one round trip, or three under locks; a PUT takes two, or four.
    for (bed, expected) in beds.iter().zip([1.5, 3.5]) {
        let alone = bed.measure(1, 400).expect("nothing fails");
        assert!((alone.round_trips / expected - 1.0).abs() < 0.05, "{expected} round trips, and {alone:?}");
    }
    let [free, locked] = beds.each_ref().map(|bed| bed.measure(160, 1_500).expect("nothing fails"));
    let ratio = free.ops_per_s / locked.ops_per_s;
    assert!((ratio / 1.5 - 1.0).abs() < 0.15, "{ratio}: {free:?} without locks, {locked:?} with locks");
    let slowed = beds.each_mut().map(|bed| {
        let [even, skewed] = [0.0, 1.2].map(|skew| {
            bed.set_skew(skew);
            bed.measure(100, 500).expect("nothing fails").ops_per_s
        });
        even / skewed
    });
    assert!(slowed[0] < 1.25 && slowed[1] > 3.0, "{slowed:?}");
}

#[test]
fn impossible_blocks_are_refused() {
    for (load, value_len) in [(BLOCKS, 100), (LOCKED, 64 << 10)] {
        let refused = Bed::new(Load { value_len, ..load }, 1).err().expect("no such blocks");
        assert!(refused.contains("give a multiple of 512 up to 32768"), "{refused}");
    }
}

/// A model of YCSB-T on PRISM-TX: transactions of one key, which update it.
const TRANSACTIONS: Load = Load { system: "prism-tx", reads: 0.0, records: Some(2_000), ..LOAD };

/// A model of YCSB-T on FaRM, whose READs the NIC runs.
const FARM: Load = Load { system: "farm", platform: Platform::Rdma, ..TRANSACTIONS };

/// A model of YCSB-T on FaSST, on one node.
const FASST: Load = Load { system: "fasst", ..FARM };

#[test]
fn a_transaction_takes_the_round_trips_of_its_phases() {
    let paper = Variant::TWO_ROUNDS;
    for (name, load, expected) in [
        ("reads, checks, installs", TRANSACTIONS, 3.0),
        ("two rounds of checks", Load { variant: paper, ..TRANSACTIONS }, 4.0),
        ("two keys at the same time", Load { keys: 2, variant: paper, ..TRANSACTIONS }, 4.0),
        ("a read of a key", Load { reads: 1.0, ..TRANSACTIONS }, 1.0),
        ("reads of two keys, and their checks", Load { reads: 1.0, keys: 2, ..TRANSACTIONS }, 2.0),
        ("index, object, locks, installs", FARM, 4.0),
        ("index, object", Load { reads: 1.0, ..FARM }, 2.0),
        ("indices, objects, their checks", Load { reads: 1.0, keys: 2, ..FARM }, 3.0),
        ("lock+get, log, install", FASST, 3.0),
        ("get", Load { reads: 1.0, ..FASST }, 1.0),
        ("gets, their checks", Load { reads: 1.0, keys: 2, ..FASST }, 2.0),
    ] {
        let alone = Bed::new(load, 1).and_then(|bed| bed.measure(1, 500)).expect("nothing fails");
        println!("{name}: {alone:?}");
        // A client renews its reservation of timestamps now and then.
        assert!(
            (alone.round_trips / expected - 1.0).abs() < 0.02,
            "{name}: {} round trips",
            alone.round_trips
        );
    }
}

/// Updates of a hot key follow one another. A client that repeats an update until it commits waits for all before it.
#[test]
fn clients_that_give_up_conflicting_transactions_commit_more_of_the_others() {
    let hot = Load { skew: 1.5, ..TRANSACTIONS };
    let [gives_up, repeats] = [true, false].map(|gives_up| {
        let load = Load { variant: Variant { gives_up, ..Variant::TWO_ROUNDS }, ..hot };
        Bed::new(load, 1).and_then(|bed| bed.measure(32, 2_000)).expect("nothing fails")
    });
    println!("{gives_up:?}, and with repetitions {repeats:?}");
    assert!(gives_up.ops_per_s > 2.0 * repeats.ops_per_s);
}

#[test]
fn transactions_that_no_log_entry_holds_are_refused() {
    for (keys, value_len, remedy) in
        [(1, 60_000, "give at most 49152"), (4, 20_000, "give fewer keys, or shorter values")]
    {
        let refused = Bed::new(Load { keys, value_len, ..TRANSACTIONS }, 1).err().expect("too long");
        assert!(refused.contains(remedy), "{refused}");
    }
}

/// The figures of PRISM-TX and FaRM miss these published values and no others. The guide has the reasons.
#[test]
#[ignore = "takes minutes: cargo xtask soak"]
fn soak_prism_figures_9_and_10_are_predicted() {
    let of_9 = vec![
        "PRISM-TX, peak",
        "FaRM (HW), low load",
        "FaRM (SW), low load",
        "PRISM-TX / FaRM (HW), peak",
        "PRISM-TX / FaRM (HW), low load",
    ];
    let of_10 = vec!["PRISM-TX's peak is higher than that of FaRM (HW) at every coefficient"];
    for (name, expected) in [("prism-9", of_9), ("prism-10", of_10)] {
        let figure = Figure::named(name).expect("the figure exists");
        assert_eq!(missed(figure, OPERATIONS), expected, "{name}");
    }
}

/// Predicted latencies of FaRM are lower than the published ones, which are those of three READs and three calls: with
/// a validation of the keys that are written, too, and a call that only unlocks.
#[test]
fn the_published_latencies_of_farm_are_those_of_three_reads_and_three_calls() {
    for (platform, published) in [(Platform::Rdma, 28.3), (Platform::PrismSw, 35.0)] {
        let alone = |reads: f64, keys: usize| {
            let load = Load { reads, keys, platform, ..FARM };
            Bed::new(load, 1).and_then(|bed| bed.measure(1, 200)).expect("nothing fails").mean_us
        };
        let (two_reads, three_reads, update) = (alone(1.0, 1), alone(1.0, 2), alone(0.0, 1));
        let call = (update - two_reads) / 2.0;
        let sum = three_reads + 3.0 * call;
        println!("{platform:?}: {two_reads}, {three_reads}, and {update} us; a call {call} us, all {sum} us");
        assert!(update < 0.85 * published, "{update} us");
        assert!((sum / published - 1.0).abs() < 0.15, "{sum} us");
    }
}

/// Values travel to the node twice, in the intent and in the install. With values of half the length, as many bytes
/// travel to it as if each value of 512 bytes did so once.
#[test]
#[ignore = "takes minutes: cargo xtask soak"]
fn soak_values_that_travel_twice_cost_prism_tx_its_peak() {
    let load = Load { variant: Variant::TWO_ROUNDS, records: None, ..TRANSACTIONS };
    let half = Load { value_len: 256, ..load };
    let twice_the_link = Load { testbed: Testbed { link_gbit: 80, ..load.testbed }, ..load };
    let [whole, half, fast] = [load, half, twice_the_link].map(|load| {
        let curve = Bed::new(load, 1).and_then(|bed| bed.curve(OPERATIONS)).expect("nothing fails");
        let peak = curve.into_iter().max_by(|one, other| one.ops_per_s.total_cmp(&other.ops_per_s));
        let peak = peak.expect("a curve has a point");
        println!("values of {} bytes, {} Gb/s: {peak:?}", load.value_len, load.testbed.link_gbit);
        peak
    });
    let saved = whole.bytes_in - half.bytes_in;
    assert!((saved / 512.0 - 1.0).abs() < 0.05, "{saved} bytes, of two values");
    let ratio = half.ops_per_s / whole.ops_per_s;
    let of_bytes = whole.bytes_in / half.bytes_in;
    assert!((ratio / of_bytes - 1.0).abs() < 0.05, "the link is the limit: {ratio}, and bytes {of_bytes}");
    assert!(fast.ops_per_s > 1.5 * whole.ops_per_s, "a faster link is faster");
}
