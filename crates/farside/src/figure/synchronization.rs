//! Figures of Ziegler et al., *Design Guidelines for Correct, Efficient, and Scalable Synchronization using One-Sided
//! RDMA* (SIGMOD 2023).

use super::{At, Claim, Curve, Figure, OnFabrics, Predict, Published, Shape, Value};
use farside_sim::micro::{SECTION_4 as NUMBERS, Workers, mverbs};

/// Section 4: throughput of atomics on one NIC. The model is calibrated on these numbers.
pub(super) static SECTION_4: Figure = Figure {
    name: "synchronization-4",
    title: "Synchronization, section 4: atomics on one NIC",
    source: "Ziegler et al., SIGMOD 2023, section 4",
    axes: ["verbs", "million a second"],
    places: || NUMBERS.into_iter().map(|(what, ..)| what).collect(),
    unit: "M/s",
    curves: || {
        let published = NUMBERS.into_iter().enumerate().map(|(place, (.., value))| Published {
            at: At::Place(place),
            value,
            judged: Shape::Within(0.25),
        });
        vec![Curve {
            name: "verbs",
            predict: Predict::Each(Box::new(|place| Some(mverbs(NUMBERS[place].1)))),
            published: published.collect(),
            unpublished: "not in the paper",
        }]
    },
    headlines: &[],
    claims: &[
        Claim {
            what: "8 bytes of padding on 4 KiB raise the throughput at least ten times",
            ratios: &[(PADDED, UNPADDED, Shape::AtLeast(10.0))],
        },
        Claim {
            what: "the throughput on one word stops growing at 8 workers",
            ratios: &[
                (Value::Of(|| contended(4)), Value::Of(|| contended(8)), Shape::Below(0.9)),
                (Value::Of(|| contended(16)), Value::Of(|| contended(8)), Shape::Below(1.1)),
            ],
        },
        Claim {
            what: "512 workers are slower than 128",
            ratios: &[(Value::Of(|| apart(512, 64)), Value::Of(|| apart(128, 64)), Shape::Below(1.0))],
        },
    ],
    fabrics: OnFabrics::Nothing("the atomics of a NIC"),
};

const PADDED: Value = Value::Of(|| apart(128, 4_096 + 8));
const UNPADDED: Value = Value::Of(|| apart(128, 4_096));

/// Throughput of CAS in million per second if all workers use one word.
fn contended(workers: u32) -> f64 {
    apart(workers, 0)
}

/// Throughput of CAS in million per second if each worker uses its own word, `stride` bytes from the next word.
fn apart(workers: u32, stride: u64) -> f64 {
    mverbs(Workers::cas(workers, stride))
}
