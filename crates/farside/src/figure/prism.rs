//! Figures of Burke et al., *PRISM: Rethinking the RDMA Interface for Distributed Systems* (SOSP 2021). The numbers
//! were read from the printed figures.
//!
//! The curves of figures 6 and 7 were not available. Their predictions are compared with the paper's text.
//!
//! Invariant: the numbers of figures 3, 4, 6, 7, 9 and 10 are not inputs of the model. The numbers that calibrate the
//! model are in [`farside_sim::micro`].

use super::ratio::Runner;
use super::{At, Claim, Curve, Figure, Headline, OnFabrics, Ops, Predict, Published, Shape, Stores, Value};
use farside_bench::workload::Lengths;
use farside_predict::{Load, Variant};
use farside_sim::hardware::{Distance, INPUTS, Platform, Testbed};
use farside_sim::micro::{FIGURE_1 as BARS, FIGURE_2 as NETWORKS, MicroOp, latency};
use farside_systems::blocks::{abd_lock, prism_rs};
use farside_systems::kv::{pilaf, prism_kv};
use farside_systems::txn::{farm, prism_tx};

const LATENCY: &str = "latency, us";
/// Distances between the client and the node in figure 2.
const FAR: [Distance; 3] = [Distance::Rack, Distance::Cluster, Distance::DataCentre];

fn micros(op: MicroOp, platform: Platform, distance: Distance) -> Option<f64> {
    latency(op, platform, distance).map(|ns| ns as f64 / 1e3)
}

/// Figure 1: latency of each op. The model is calibrated on this figure.
pub(super) static FIGURE_1: Figure = Figure {
    name: "prism-1",
    title: "PRISM, figure 1: latency of an op, 512 bytes, one cable",
    source: "Burke et al., SOSP 2021, figure 1",
    axes: ["op", LATENCY],
    places: || BARS.into_iter().map(|(op, _)| op.name()).collect(),
    unit: "us",
    curves: || {
        let curve = |platform: Platform| {
            let bars =
                BARS.into_iter().enumerate().filter_map(|(place, (op, _))| Some((place, bar(op, platform)?)));
            Curve {
                name: platform.name(),
                predict: Predict::Each(Box::new(move |place| {
                    let (op, _) = BARS[place];
                    bar(op, platform).and_then(|_| micros(op, platform, Distance::Direct))
                })),
                published: bars.map(|bar| published(bar, Shape::Within(0.05))).collect(),
                unpublished: "not in the paper",
            }
        };
        Platform::ALL.map(curve).into()
    },
    headlines: &[],
    claims: &[],
    rivals: None,
    fabrics: OnFabrics::Ops(Ops {
        ops: &MicroOp::FIGURE_1,
        base: MicroOp::Read,
        distances: &[Testbed::PRISM_MICRO.distance],
        curve: "over READ",
        axes: ["op", "latency / READ's"],
        point: |op, _| op.name(),
        // The paper has bars for one distance only: a single cable.
        published: |runner, op, distance| {
            let bar = |op| bar(op, runner.platform());
            (distance == Testbed::PRISM_MICRO.distance).then(|| Some(bar(op)? / bar(MicroOp::Read)?))?
        },
    }),
};

/// The bar of figure 1 for an op on a platform, in microseconds.
fn bar(op: MicroOp, platform: Platform) -> Option<f64> {
    let (_, bars) = BARS.into_iter().find(|&(of, _)| of == op)?;
    bars[Platform::ALL.into_iter().position(|of| of == platform)?]
}

fn published((place, value): (usize, f64), judged: Shape) -> Published {
    Published { at: At::Place(place), value, judged }
}

/// Figure 2: latency of an indirect READ over three networks.
pub(super) static FIGURE_2: Figure = Figure {
    name: "prism-2",
    title: "PRISM, figure 2: latency of an indirect READ, 512 bytes",
    source: "Burke et al., SOSP 2021, figure 2",
    axes: ["network", LATENCY],
    places: || FAR.map(Distance::name).into(),
    unit: "us",
    curves: || {
        let curve = |(platform, op, points): (Platform, MicroOp, [f64; 3])| {
            let judged = match platform {
                Platform::Rdma | Platform::PrismSw => Shape::Within(0.10),
                Platform::PrismHw => Shape::Reported("implies 2.5 us, where figure 1 has 3.1 us"),
                Platform::BlueField => Shape::Reported("implies 11.8 us, where figure 1 has 14.9 us"),
            };
            Curve {
                name: if op == MicroOp::TwoReads { "rdma, 2 READs" } else { platform.name() },
                predict: Predict::Each(Box::new(move |place| micros(op, platform, FAR[place]))),
                published: points.into_iter().enumerate().map(|point| published(point, judged)).collect(),
                unpublished: "not in the paper",
            }
        };
        NETWORKS.map(curve).into()
    },
    headlines: &[],
    claims: &[],
    rivals: None,
    fabrics: OnFabrics::Ops(Ops {
        ops: &[MicroOp::IndirectRead, MicroOp::TwoReads],
        base: MicroOp::TwoReads,
        distances: &FAR,
        curve: "indirect READ",
        axes: ["network", "latency / that of 2 x READ"],
        point: |_, distance| distance.name(),
        published: |runner, _, distance| indirection(runner, distance),
    }),
};

/// Published latency of an indirect READ divided by that of two READs. The paper has the latency of two READs for plain
/// RDMA only. For an engine, this function takes twice the sum of figure 1's READ and the network's round trip.
fn indirection(runner: Runner, distance: Distance) -> Option<f64> {
    let place = FAR.into_iter().position(|far| far == distance)?;
    let of = |platform: Platform| {
        let (.., points) = NETWORKS.into_iter().find(|&(of, ..)| of == platform)?;
        Some(points[place])
    };
    let two_reads = match runner {
        Runner::Caller => of(Platform::Rdma)?,
        Runner::Engine => {
            2.0 * (bar(MicroOp::Read, Platform::PrismSw)? + distance.round_trip_ns() as f64 / 1e3)
        }
    };
    Some(of(runner.platform())? / two_reads)
}

/// A system on a platform, as the paper's figures compare them.
#[derive(Clone, Copy)]
struct Contender {
    name: &'static str,
    system: &'static str,
    variant: Variant,
    platform: Platform,
}

/// PRISM-KV that frees buffers as in the paper. Its predictions are compared with the published numbers.
const PRISM_KV: Contender = Contender {
    name: "PRISM-KV",
    system: prism_kv::KIND,
    variant: Variant::PAPER,
    platform: Platform::PrismSw,
};
/// PRISM-KV as this project implements it: chains retire the buffers that they make unreachable.
const OUR_PRISM_KV: Contender =
    Contender { name: "PRISM-KV, reclaiming", variant: Variant::OURS, ..PRISM_KV };
const PILAF_HW: Contender =
    Contender { name: "Pilaf (HW)", system: pilaf::KIND, variant: Variant::OURS, platform: Platform::Rdma };
const PILAF_SW: Contender = Contender { name: "Pilaf (SW)", platform: Platform::PrismSw, ..PILAF_HW };

/// Published numbers of a contender.
struct Numbers {
    /// Throughput and latency at low load: million operations per second, if the figure shows it, and microseconds.
    low: (Option<f64>, f64),
    /// Points between low load and peak: throughput in million operations per second, and latency in microseconds.
    points: &'static [(f64, f64)],
    /// Highest throughput, in million operations per second.
    peak: f64,
}

impl Numbers {
    fn published(&self, low_judged: Shape) -> Vec<Published> {
        let published = |at, value, judged| Published { at, value, judged };
        let points = self.points.iter().map(|&(mops, us)| published(At::Throughput(mops), us, BETWEEN));
        let low = published(At::Low(self.low.0), self.low.1, low_judged);
        [low].into_iter().chain(points).chain([published(At::Peak, self.peak, WITHIN)]).collect()
    }
}

/// Condition for the low-load latency and the peak of a curve.
const WITHIN: Shape = Shape::Within(0.15);
/// Condition for the points between low load and peak.
const BETWEEN: Shape =
    Shape::Reported("the model's times do not vary, so its queues below the peak are others");

impl Contender {
    /// The contender's curve for a share of reads, with its published numbers.
    fn curve(&self, reads: f64, low_judged: Shape, numbers: Numbers) -> Curve {
        Curve { published: numbers.published(low_judged), ..self.unpublished(reads) }
    }

    /// The contender's curve for a share of reads, without published numbers.
    fn unpublished(&self, reads: f64) -> Curve {
        let predict = Predict::UnderLoad(Box::new(self.load(reads)));
        Curve { name: self.name, predict, published: Vec::new(), unpublished: "not in the paper" }
    }

    fn load(&self, reads: f64) -> Load {
        Load {
            system: self.system,
            variant: self.variant,
            platform: self.platform,
            testbed: Testbed::PRISM_APPLICATIONS,
            inputs: INPUTS,
            reads,
            // Of a transaction too: see `FIGURE_9`.
            keys: 1,
            value_len: 512,
            lengths: Lengths::Constant,
            skew: 0.0,
            records: None,
            cached: 0,
        }
    }
}

const UNDER_LOAD: [&str; 2] = ["million operations a second", "mean latency, us"];

const fn stores(workload: &'static str) -> OnFabrics {
    OnFabrics::Stores(Stores {
        workload,
        systems: &[prism_kv::KIND, pilaf::KIND],
        distance: Testbed::PRISM_APPLICATIONS.distance,
        axes: ["throughput / Pilaf's peak", "latency / Pilaf's at low load"],
    })
}

const fn low(of: Contender) -> Value {
    Value::On(of.name, At::Low(None))
}

const fn peak(of: Contender) -> Value {
    Value::On(of.name, At::Peak)
}

/// Figure 3: latency over throughput of key-value stores, 100 % reads.
pub(super) static FIGURE_3: Figure = Figure {
    name: "prism-3",
    title: "PRISM, figure 3: 100 % reads, 512 bytes, uniform",
    source: "Burke et al., SOSP 2021, figure 3",
    axes: UNDER_LOAD,
    places: Vec::new,
    unit: "",
    curves: || {
        vec![
            PRISM_KV.curve(
                1.0,
                WITHIN,
                Numbers { low: (Some(0.5), 6.5), points: &[(4.1, 6.9), (7.0, 8.1)], peak: 8.2 },
            ),
            OUR_PRISM_KV.unpublished(1.0),
            PILAF_HW.curve(1.0, WITHIN, Numbers { low: (Some(0.4), 9.0), points: &[(5.6, 10.5)], peak: 6.7 }),
            PILAF_SW.curve(1.0, WITHIN, Numbers { low: (None, 13.4), points: &[(3.7, 16.4)], peak: 6.6 }),
        ]
    },
    headlines: &[],
    claims: &[
        Claim {
            what: "at low load PRISM-KV is faster than Pilaf (HW), which is faster than Pilaf (SW)",
            ratios: &[
                (low(PRISM_KV), low(PILAF_HW), Shape::Below(1.0)),
                (low(PILAF_HW), low(PILAF_SW), Shape::Below(1.0)),
            ],
        },
        Claim {
            what: "PRISM-KV's peak is higher than both peaks of Pilaf",
            ratios: &[
                (peak(PRISM_KV), peak(PILAF_HW), Shape::Above(1.1)),
                (peak(PRISM_KV), peak(PILAF_SW), Shape::Above(1.1)),
            ],
        },
    ],
    rivals: None,
    fabrics: stores("c"),
};

/// Figure 4: latency over throughput of key-value stores, 50 % reads and 50 % writes.
pub(super) static FIGURE_4: Figure = Figure {
    name: "prism-4",
    title: "PRISM, figure 4: 50 % reads, 512 bytes, uniform",
    source: "Burke et al., SOSP 2021, figure 4",
    axes: UNDER_LOAD,
    places: Vec::new,
    unit: "",
    curves: || {
        let two = Shape::Reported("the paper's text has 8 us for a GET and 6 us for a PUT: 7 us on average");
        vec![
            PRISM_KV.curve(
                0.5,
                WITHIN,
                Numbers { low: (None, 9.5), points: &[(9.1, 13.4), (11.8, 21.0)], peak: 11.9 },
            ),
            OUR_PRISM_KV.unpublished(0.5),
            PILAF_HW.curve(0.5, two, Numbers { low: (None, 8.7), points: &[(10.2, 11.6)], peak: 11.9 }),
            PILAF_SW.curve(0.5, WITHIN, Numbers { low: (None, 10.6), points: &[(7.7, 20.0)], peak: 9.2 }),
        ]
    },
    headlines: &[],
    claims: &[
        Claim {
            what: "at low load Pilaf (HW) is faster than PRISM-KV, which is faster than Pilaf (SW)",
            ratios: &[
                (low(PILAF_HW), low(PRISM_KV), Shape::Below(1.0)),
                (low(PRISM_KV), low(PILAF_SW), Shape::Below(1.0)),
            ],
        },
        Claim {
            what: "the peaks of PRISM-KV and Pilaf (HW) are higher than that of Pilaf (SW)",
            ratios: &[
                (peak(PRISM_KV), peak(PILAF_SW), Shape::Above(1.05)),
                (peak(PILAF_HW), peak(PILAF_SW), Shape::Above(1.05)),
            ],
        },
        Claim {
            what: "the peaks of PRISM-KV and Pilaf (HW) are within 15 % of each other",
            ratios: &[(peak(PRISM_KV), peak(PILAF_HW), WITHIN)],
        },
    ],
    rivals: None,
    fabrics: stores("a"),
};

/// PRISM-RS that frees buffers as in the paper.
const PRISM_RS: Contender = Contender {
    name: "PRISM-RS",
    system: prism_rs::KIND,
    variant: Variant::PAPER,
    platform: Platform::PrismSw,
};
/// PRISM-RS as this project implements it: chains retire the buffers that they make unreachable.
const OUR_PRISM_RS: Contender =
    Contender { name: "PRISM-RS, reclaiming", variant: Variant::OURS, ..PRISM_RS };
/// ABDLOCK over the verbs of the NIC, with a round trip each for lock, read, write and release.
const ABDLOCK_HW: Contender = Contender {
    name: "ABDLOCK (HW)",
    system: abd_lock::KIND,
    variant: Variant::RELEASES_APART,
    platform: Platform::Rdma,
};
const ABDLOCK_SW: Contender = Contender { name: "ABDLOCK (SW)", platform: Platform::PrismSw, ..ABDLOCK_HW };
/// ABDLOCK as this project implements it: the release is in the list of the write.
const OUR_ABDLOCK: Contender =
    Contender { name: "ABDLOCK (HW), 3 trips", variant: Variant::OURS, ..ABDLOCK_HW };

/// Share of reads of figures 6 and 7.
const HALF: f64 = 0.5;
const UNAVAILABLE: &str = "the published curve is not available";
const REPLICATED: OnFabrics = OnFabrics::Nothing("replicas on three nodes, each with a link of its own");

/// Figure 6: latency over throughput of replicated block stores.
pub(super) static FIGURE_6: Figure = Figure {
    name: "prism-6",
    title: "PRISM, figure 6: replicated blocks, 50 % writes, 512 bytes, uniform",
    source: "Burke et al., SOSP 2021, figure 6",
    axes: UNDER_LOAD,
    places: Vec::new,
    unit: "",
    curves: || {
        let published = |of: Contender| Curve { unpublished: UNAVAILABLE, ..of.unpublished(HALF) };
        vec![
            published(PRISM_RS),
            OUR_PRISM_RS.unpublished(HALF),
            published(ABDLOCK_HW),
            OUR_ABDLOCK.unpublished(HALF),
            published(ABDLOCK_SW),
        ]
    },
    headlines: &[Headline {
        curves: "PRISM-RS / ABDLOCK (HW)",
        point: "peak",
        of: peak(PRISM_RS),
        to: peak(ABDLOCK_HW),
        // The paper's text: about 50 % more throughput than the approach with locks.
        published: Some(1.5),
        judged: WITHIN,
    }],
    claims: &[Claim {
        what: "PRISM-RS's peak is higher than both peaks of ABDLOCK, although software runs its operations",
        ratios: &[
            (peak(PRISM_RS), peak(ABDLOCK_HW), Shape::Above(1.1)),
            (peak(PRISM_RS), peak(ABDLOCK_SW), Shape::Above(1.1)),
        ],
    }],
    rivals: None,
    fabrics: REPLICATED,
};

/// Zipf coefficients of figure 7. The paper's own are not available; these are figure 10's, up to 1.2.
const COEFFICIENTS: [f64; 7] = [0.0, 0.6, 0.8, 0.9, 1.0, 1.1, 1.2];
/// Number of clients of figure 7.
const CLIENTS: u32 = 100;
const UNIFORM: At = At::Place(0);
const MOST_SKEWED: At = At::Place(COEFFICIENTS.len() - 1);

/// Latency of a contender for a coefficient.
const fn at(of: Contender, coefficient: At) -> Value {
    Value::On(of.name, coefficient)
}

/// Latency of a contender at the largest coefficient, relative to that with uniform keys.
const fn of_skew(of: Contender, published: Option<f64>, judged: Shape) -> Headline {
    let (curves, point) = (of.name, "1.2, relative to 0");
    Headline { curves, point, of: at(of, MOST_SKEWED), to: at(of, UNIFORM), published, judged }
}

/// Condition for the latency of ABDLOCK under skew.
const EXPLODES: Shape = Shape::Reported("the paper has no number: see the claim");

/// Figure 7: latency of replicated block stores over the skew of the keys.
pub(super) static FIGURE_7: Figure = Figure {
    name: "prism-7",
    title: "PRISM, figure 7: replicated blocks, 50 % writes, 512 bytes, 100 clients",
    source: "Burke et al., SOSP 2021, figure 7",
    axes: ["Zipf coefficient", "mean latency, us"],
    places: || vec!["0", "0.6", "0.8", "0.9", "1.0", "1.1", "1.2"],
    unit: "us",
    curves: || {
        let curve = |of: Contender| Curve {
            name: of.name,
            predict: Predict::UnderSkew {
                load: Box::new(of.load(HALF)),
                clients: CLIENTS,
                coefficients: &COEFFICIENTS,
            },
            published: Vec::new(),
            unpublished: UNAVAILABLE,
        };
        [PRISM_RS, ABDLOCK_HW, ABDLOCK_SW].map(curve).into()
    },
    headlines: &[
        // The paper's text: skew leaves the latency flat.
        of_skew(PRISM_RS, Some(1.0), Shape::Within(0.25)),
        of_skew(ABDLOCK_HW, None, EXPLODES),
        of_skew(ABDLOCK_SW, None, EXPLODES),
    ],
    claims: &[Claim {
        what: "skew multiplies the latency of ABDLOCK by more than 3",
        ratios: &[
            (at(ABDLOCK_HW, MOST_SKEWED), at(ABDLOCK_HW, UNIFORM), Shape::Above(3.0)),
            (at(ABDLOCK_SW, MOST_SKEWED), at(ABDLOCK_SW, UNIFORM), Shape::Above(3.0)),
        ],
    }],
    rivals: None,
    fabrics: REPLICATED,
};

/// PRISM-TX with two rounds of checks and with the buffers of the paper. What it adds to the paper's protocol, intents
/// and aborts in order, is that of [`OUR_PRISM_TX`]. Its predictions are compared with the published numbers.
const PRISM_TX: Contender = Contender {
    name: "PRISM-TX",
    system: prism_tx::KIND,
    variant: Variant::TWO_ROUNDS,
    platform: Platform::PrismSw,
};
/// PRISM-TX as this project implements it: one round of checks, and chains that retire buffers.
const OUR_PRISM_TX: Contender = Contender { name: "PRISM-TX, together", variant: Variant::OURS, ..PRISM_TX };
/// PRISM-TX in two rounds, as if its intents cost nothing: an experiment on why the published peak is missed.
const FREE_INTENTS: Contender =
    Contender { name: "PRISM-TX, intents free", variant: Variant::NO_INTENTS, ..PRISM_TX };
/// FaRM without backups, as the paper compares itself with it: READs by the NIC, and calls to the node's cores.
const FARM_HW: Contender =
    Contender { name: "FaRM (HW)", system: farm::KIND, variant: Variant::OURS, platform: Platform::Rdma };
/// FaRM whose READs are run by the software engine, too.
const FARM_SW: Contender = Contender { name: "FaRM (SW)", platform: Platform::PrismSw, ..FARM_HW };

/// Share of transactions that only read, of figures 9 and 10. YCSB-T has read-modify-writes only.
const UPDATES: f64 = 0.0;
const TRANSACTIONS: OnFabrics = OnFabrics::Nothing("a rival of PRISM-TX");

/// Figure 9: latency over throughput of transactional stores.
///
/// The paper does not say how many keys a transaction has. Two values of 512 bytes, which are read and written, at the
/// published peak would need 49 Gb/s in each direction, more than the node's link has.
pub(super) static FIGURE_9: Figure = Figure {
    name: "prism-9",
    title: "PRISM, figure 9: YCSB-T, one key a transaction, 512 bytes, uniform",
    source: "Burke et al., SOSP 2021, figure 9",
    axes: ["million transactions a second", "mean latency, us"],
    places: Vec::new,
    unit: "",
    curves: || {
        vec![
            PRISM_TX.curve(
                UPDATES,
                WITHIN,
                Numbers {
                    low: (Some(0.7), 22.7),
                    points: &[(2.5, 25.0), (4.5, 29.0), (5.7, 34.0)],
                    peak: 5.98,
                },
            ),
            OUR_PRISM_TX.unpublished(UPDATES),
            FREE_INTENTS.unpublished(UPDATES),
            FARM_HW.curve(
                UPDATES,
                WITHIN,
                Numbers { low: (Some(0.56), 28.3), points: &[(3.1, 31.0), (4.8, 39.6)], peak: 4.97 },
            ),
            FARM_SW.curve(
                UPDATES,
                WITHIN,
                Numbers { low: (None, 35.0), points: &[(2.3, 42.0), (4.5, 56.0)], peak: 4.95 },
            ),
        ]
    },
    headlines: &[
        // The paper's introduction: 20 % more throughput, and 18 % less latency. Each may differ by 5 points.
        Headline {
            curves: "PRISM-TX / FaRM (HW)",
            point: "peak",
            of: peak(PRISM_TX),
            to: peak(FARM_HW),
            published: Some(1.2),
            judged: Shape::Within(0.05 / 1.2),
        },
        Headline {
            curves: "PRISM-TX / FaRM (HW)",
            point: "low load",
            of: low(PRISM_TX),
            to: low(FARM_HW),
            published: Some(0.82),
            judged: Shape::Within(0.05 / 0.82),
        },
    ],
    claims: &[],
    rivals: None,
    fabrics: TRANSACTIONS,
};

/// Zipf coefficients of figure 10, with the published peaks of PRISM-TX, FaRM (HW) and FaRM (SW).
const PEAKS: [(f64, [f64; 3]); 10] = [
    (0.0, [5.95, 4.93, 4.93]),
    (0.6, [5.95, 4.93, 4.93]),
    (0.8, [5.95, 4.9, 4.9]),
    (0.9, [5.85, 4.77, 4.75]),
    (1.0, [5.45, 4.2, 4.2]),
    (1.1, [4.5, 3.4, 3.4]),
    (1.2, [3.55, 2.7, 2.7]),
    (1.3, [2.85, 2.2, 2.05]),
    (1.4, [2.27, 1.68, 1.57]),
    (1.5, [1.82, 1.3, 1.22]),
];
/// The coefficients of [`PEAKS`].
const ZIPF: [f64; PEAKS.len()] = {
    let mut zipf = [0.0; PEAKS.len()];
    let mut place = 0;
    while place < zipf.len() {
        zipf[place] = PEAKS[place].0;
        place += 1;
    }
    zipf
};

const HOTTEST: At = At::Place(PEAKS.len() - 1);

/// Ratios of two contenders' peaks at each coefficient, all with the same condition.
const fn at_each(of: Contender, to: Contender, judged: Shape) -> [(Value, Value, Shape); PEAKS.len()] {
    let mut ratios = [(at(of, UNIFORM), at(to, UNIFORM), judged); PEAKS.len()];
    let mut place = 0;
    while place < ratios.len() {
        ratios[place] = (at(of, At::Place(place)), at(to, At::Place(place)), judged);
        place += 1;
    }
    ratios
}

/// Numbers of clients of figure 10. The highest throughput of all counts, since throughput falls and rises again: with
/// 54 to 181 clients, requests arrive at the link at the same time, and the link is idle in between.
const UP_TO_PEAK: [u32; 9] = [40, 60, 80, 120, 160, 240, 320, 640, 960];

/// Figure 10: peak throughput of transactional stores over the skew of the keys.
///
/// Clients do not repeat what they abort: with them, the paper's peaks are not possible. Two transactions that update
/// one key are at least three round trips apart, so a key that has 38 % of the transactions, as at 1.5, allows 0.15
/// million of them a second at most if none is given up, and the figure has 1.8.
pub(super) static FIGURE_10: Figure = Figure {
    name: "prism-10",
    title: "PRISM, figure 10: YCSB-T, one key a transaction, 512 bytes, peaks",
    source: "Burke et al., SOSP 2021, figure 10",
    axes: ["Zipf coefficient", "million committed transactions a second"],
    places: || vec!["0", "0.6", "0.8", "0.9", "1.0", "1.1", "1.2", "1.3", "1.4", "1.5"],
    unit: "M/s",
    curves: || {
        let numbers = |system: usize, judged| {
            let of =
                |(place, (_, peaks)): (usize, &(f64, [f64; 3]))| published((place, peaks[system]), judged);
            PEAKS.iter().enumerate().map(of).collect()
        };
        let predicted = |of: Contender, name: &'static str, gives_up: bool, published| {
            let load = of.load(UPDATES);
            let load = Load { variant: Variant { gives_up, ..load.variant }, ..load };
            let predict =
                Predict::PeakUnderSkew { load: Box::new(load), clients: &UP_TO_PEAK, coefficients: &ZIPF };
            Curve { name, predict, published, unpublished: "not in the paper" }
        };
        let judged = Shape::Reported("the paper does not say when its clients try again");
        vec![
            predicted(PRISM_TX, PRISM_TX.name, true, numbers(0, judged)),
            predicted(OUR_PRISM_TX, OUR_PRISM_TX.name, true, Vec::new()),
            predicted(PRISM_TX, "PRISM-TX, repeating", false, Vec::new()),
            predicted(FARM_HW, FARM_HW.name, true, numbers(1, judged)),
            predicted(FARM_SW, FARM_SW.name, true, numbers(2, judged)),
        ]
    },
    headlines: &[],
    claims: &[
        Claim {
            what: "up to 0.9 skew costs PRISM-TX at most a tenth of its peak, and at 1.5 more than half of it",
            ratios: &[
                (at(PRISM_TX, At::Place(3)), at(PRISM_TX, UNIFORM), Shape::Above(0.9)),
                (at(PRISM_TX, HOTTEST), at(PRISM_TX, UNIFORM), Shape::Below(0.5)),
            ],
        },
        Claim {
            what: "PRISM-TX's peak is higher than that of FaRM (HW) at every coefficient",
            ratios: &at_each(PRISM_TX, FARM_HW, Shape::Above(1.0)),
        },
        Claim {
            what: "FaRM (HW)'s peak is at least 95 % of that of FaRM (SW) at every coefficient",
            ratios: &at_each(FARM_HW, FARM_SW, Shape::AtLeast(0.95)),
        },
    ],
    rivals: None,
    fabrics: TRANSACTIONS,
};
