//! The hardware model is calibrated on micro-benchmarks: it gives back what they measured.

use farside_sim::hardware::{Distance, Platform};
use farside_sim::micro::{MicroOp, latency, mverbs};

/// PRISM (SOSP 2021), figure 1: microseconds of an op of 512 bytes, of a CAS of a word, over one cable.
const FIGURE_1: [(MicroOp, [Option<f64>; 4]); 5] = [
    (MicroOp::Read, [Some(2.5), Some(5.3), Some(2.5), Some(11.7)]),
    (MicroOp::Write, [Some(1.9), Some(5.0), Some(1.9), Some(12.7)]),
    (MicroOp::IndirectRead, [None, Some(5.0), Some(3.1), Some(14.9)]),
    (MicroOp::Allocate, [None, Some(5.3), Some(1.9), Some(12.7)]),
    (MicroOp::EnhancedCas, [None, Some(5.0), Some(2.5), Some(14.6)]),
];

fn micros(op: MicroOp, platform: Platform, distance: Distance) -> Option<f64> {
    latency(op, platform, distance).map(|ns| ns as f64 / 1e3)
}

#[test]
fn every_bar_of_figure_1_is_met_within_five_percent() {
    for (op, bars) in FIGURE_1 {
        for (platform, published) in Platform::ALL.into_iter().zip(bars) {
            let predicted = micros(op, platform, Distance::Direct);
            println!("{:14} {:10} {published:?} {predicted:?}", op.name(), platform.name());
            assert_eq!(predicted.is_some(), published.is_some(), "{op:?} on {platform:?}");
            if let (Some(published), Some(predicted)) = (published, predicted) {
                let ratio = predicted / published;
                assert!((0.95..=1.05).contains(&ratio), "{op:?} on {platform:?}: {predicted} to {published}");
            }
        }
    }
}

/// Figure 2: the delays are what a network adds to a round trip. Nothing was calibrated on it.
#[test]
fn figure_2_is_predicted_within_ten_percent_where_it_does_not_contradict_figure_1() {
    let published = [
        (MicroOp::TwoReads, Platform::Rdma, [6.1, 10.9, 52.9]),
        (MicroOp::IndirectRead, Platform::PrismSw, [5.8, 8.1, 29.2]),
    ];
    for (op, platform, points) in published {
        for (distance, published) in Distance::ALL.into_iter().skip(1).zip(points) {
            let predicted = micros(op, platform, distance).expect("the platform can");
            let ratio = predicted / published;
            println!(
                "{:14} {:10} {:11} {published} {predicted}",
                op.name(),
                platform.name(),
                distance.name()
            );
            assert!((0.9..=1.1).contains(&ratio), "{op:?} at {distance:?}: {predicted} to {published}");
        }
    }
}

/// *Synchronization* (SIGMOD 2023), section 4: millions of CAS a second on one NIC, or of READs of 8 bytes.
#[test]
fn contended_and_spaced_atomics_are_as_fast_as_they_were_measured_to_be() {
    let rows = [
        ("CAS, a word each, 64 bytes apart, 128 workers", mverbs(128, 64, true), 51.2),
        ("READ of 8 bytes, 128 workers", mverbs(128, 64, false), 51.2),
        ("CAS, one word, 128 workers", mverbs(128, 0, true), 2.32),
        ("CAS, one word, 8 workers", mverbs(8, 0, true), 2.32),
        ("CAS, 256 bytes apart, 128 workers", mverbs(128, 256, true), 40.0),
        ("CAS, 512 bytes apart, 128 workers", mverbs(128, 512, true), 25.6),
        ("CAS, 4 KiB and 8 bytes apart, 128 workers", mverbs(128, 4096 + 8, true), 51.2),
    ];
    for (row, predicted, published) in rows {
        println!("{row}: {predicted:.2} to {published}");
        assert!((predicted / published - 1.0).abs() <= 0.25, "{row}: {predicted} to {published}");
    }
}

#[test]
fn padding_objects_of_4_kib_by_8_bytes_is_worth_ten_times() {
    let (padded, unpadded) = (mverbs(128, 4096 + 8, true), mverbs(128, 4096, true));
    assert!(padded >= 10.0 * unpadded, "{padded} to {unpadded}");
}

#[test]
fn one_word_is_saturated_by_8_workers_and_a_clients_nic_forgets_where_512_are_connected() {
    let contended = [1, 4, 8, 16].map(|workers| mverbs(workers, 0, true));
    assert!(contended[0] < 0.5 * contended[2] && contended[3] < 1.1 * contended[2], "{contended:?}");
    let own = [128, 256, 512].map(|workers| mverbs(workers, 64, true));
    assert!(own[1] > 0.95 * own[0] && own[2] < 0.8 * own[0], "{own:?}");
}
