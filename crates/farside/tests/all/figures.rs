//! Tests that the predictions of the papers' figures meet their conditions, and do not depend on the number of
//! simulated operations.

use farside::figure::load::{Bed, Load, Variant};
use farside::figure::{Figure, draw};
use farside_sim::hardware::{INPUTS, Inputs, Platform, Testbed};

/// Number of simulated operations per point of a curve under load.
const OPERATIONS: u64 = 8_000;

fn assert_met(name: &str) {
    let figure = Figure::named(name).expect("the figure exists");
    let prediction = figure.predict(OPERATIONS).expect("nothing fails");
    println!("{}", prediction.table());
    assert!(prediction.is_met());
    let judged = prediction.rows.iter().filter(|row| row.is_met().is_some()).count();
    assert!(judged >= 5, "{judged} rows are judged");
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
fn synchronization_section_4_is_reproduced() {
    assert_met("synchronization-4");
}

const LOAD: Load = Load {
    system: "prism-kv",
    variant: Variant::OURS,
    platform: Platform::PrismSw,
    testbed: Testbed::PRISM_APPLICATIONS,
    inputs: INPUTS,
    reads: 0.5,
    value_len: 512,
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
    let slow = Variant { name: "slow", setup: |setup| setup.inputs.core_message_ns *= 4 };
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
