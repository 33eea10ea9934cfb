//! Figures of Luo et al., *SMART: A High-Performance Adaptive Radix Tree for Disaggregated Memory* (OSDI 2023).
//!
//! The curves of the paper are not available, only some ratios that its text states, and the parameters of its
//! experiments, which its artifact has (`exp/params`). A *client* is a thread, and has two operations in flight.
//!
//! Invariant: all systems have the same machines, the same cache and the same numbers of clients.

use super::{At, Claim, Curve, Figure, Headline, OnFabrics, Point, Predict, Published, Shape, Value};
use farside_bench::index::NameKind;
use farside_predict::index::{Bed, Load, Measured, Mix};
use farside_sim::hardware::{CONNECTX_6, PACKET, Testbed};
use farside_systems::index::{Indexing, Rung};
use farside_systems::system::Options;

/// An index that the figures compare, with the names of its curves.
struct Contender {
    kind: &'static str,
    /// Name of the curve of the model with [`RECORDS`] and with [`FEW_RECORDS`].
    names: [&'static str; 2],
    /// Names of the curves of each workload, in the order of [`MIXES`].
    by_mix: [&'static str; 5],
}

/// The indexes of this release. Another one needs one entry: headlines and claims that name its curves count from then
/// on.
static CONTENDERS: [Contender; 1] = [Contender {
    kind: "smart",
    names: ["SMART", "SMART, half of the records"],
    by_mix: ["SMART, LOAD", "SMART, A", "SMART, B", "SMART, C", "SMART, D"],
}];
/// The index whose techniques and locks are figures of their own.
static SMART: &Contender = &CONTENDERS[0];

/// Indexes that headlines and claims name before this release has them.
#[cfg(test)]
pub(super) const AWAITED: [&str; 2] = ["ART", "Sherman"];

/// Number of the paper's records.
const RANKS: u64 = 60_000_000;
/// Number of the model's records: with a 256th of the paper's, a tree of numbers has one level less, and the nodes of
/// its last level have as many keys.
const RECORDS: u64 = RANKS / 256;
/// Number of records of the model with fewer records, to show what depends on it.
const FEW_RECORDS: u64 = RECORDS / 2;
/// Number of reads before the measurements, by all compute nodes together. The paper's runs have many more operations
/// for each record.
const WARM_UP: u64 = 4 * RECORDS;
/// Cache of a compute node in the paper, in bytes.
const CACHE: u64 = 600 << 20;

const UNPUBLISHED: &str = "the published curve is not available";

impl Contender {
    /// The load of most figures: numbers as keys, values of 8 bytes, two memory nodes.
    const fn load(&self) -> Load {
        Load {
            system: self.kind,
            // The machines of the model do not fail, and those of the paper neither.
            indexing: Indexing { redo: Some(false), ..Indexing::NONE },
            options: Options::NONE,
            testbed: Testbed::SMART,
            inputs: CONNECTX_6,
            members: 2,
            clients_max: 896,
            coroutines: 2,
            keys: NameKind::Numbers,
            key_padding: 0,
            value_len: 8,
            records: RECORDS,
            ranks: RANKS,
            cache_bytes: CACHE,
            warm_up: WARM_UP,
            skew: 0.99,
            is_ordered: false,
            mix: Mix::C,
        }
    }

    /// The load of the motivation: strings as keys, values of 64 bytes, one memory node.
    const fn motivation(&self) -> Load {
        let testbed = Testbed::SMART_MOTIVATION;
        Load { testbed, members: 1, clients_max: 320, value_len: VALUE, ..emails(self.load()) }
    }

    /// The curves of this contender for both numbers of records. `predict` returns the prediction of a load.
    fn sized(&self, load: Load, predict: impl Fn(Load) -> Predict) -> impl Iterator<Item = Curve> {
        let [many, few] = [load, Load { records: FEW_RECORDS, ..load }].map(predict);
        let [many_name, few_name] = self.names;
        [curve(many_name, many), curve(few_name, few)].into_iter()
    }
}

/// Length of a key of the paper's that is a string, in bytes.
const EMAIL: usize = 32;
/// Length of a value of the motivation, in bytes.
const VALUE: usize = 64;

/// The load with e-mail addresses as keys, as long as the paper's.
const fn emails(load: Load) -> Load {
    Load { keys: NameKind::Emails, key_padding: EMAIL - NameKind::Emails.len_max(), ..load }
}

fn curve(name: &'static str, predict: Predict) -> Curve {
    Curve { name, predict, published: Vec::new(), unpublished: UNPUBLISHED }
}

/// Predicts a value for each place, which has its own load and its own number of clients.
fn each<const N: usize>(places: [(Load, u32); N], value: fn(&Load, &Measured) -> f64) -> Predict {
    Predict::Found(Box::new(move |place, operations| {
        let (load, clients) = places[place];
        let measured = Bed::new(load, 1)?.measure(clients, operations.max(u64::from(clients) * 40))?;
        Ok(value(&load, &measured))
    }))
}

/// Predicts a value for each place, whose measurements `prepare` prepares on one bed. Returns the number of clients.
fn on_one_bed(
    load: Load,
    order: impl Iterator<Item = usize> + Clone + 'static,
    prepare: impl Fn(&mut Bed, usize) -> u32 + 'static,
) -> Predict {
    Predict::Points(Box::new(move |operations| {
        let mut bed = Bed::new(load, 1)?;
        let at = |place: usize| {
            let clients = prepare(&mut bed, place);
            let measured = bed.measure(clients, operations.max(u64::from(clients) * 40))?;
            Ok(Point { x: place as f64, y: mops(&load, &measured) })
        };
        let mut points: Vec<Point> = order.clone().map(at).collect::<Result<_, String>>()?;
        points.sort_by(|one, other| one.x.total_cmp(&other.x));
        Ok(points)
    }))
}

fn mops(_load: &Load, measured: &Measured) -> f64 {
    measured.ops_per_s / 1e6
}

/// Workloads of the figures, in the order of their places, with their names.
const MIXES: [(&str, Mix); 5] =
    [("LOAD", Mix::LOAD), ("A", Mix::A), ("B", Mix::B), ("C", Mix::C), ("D", Mix::D)];
const ON_A: At = At::Place(1);
const ON_C: At = At::Place(3);

/// Predicts the throughput of each workload on one bed. Those that insert come last.
fn by_mix(load: Load, clients: u32) -> Predict {
    on_one_bed(load, [3, 2, 1, 4, 0].into_iter(), move |bed, place| {
        bed.set_mix(MIXES[place].1);
        clients
    })
}

const CLIENTS_AND_RATE: [&str; 2] = ["clients", "million operations a second"];
const INDEXES: OnFabrics = OnFabrics::Nothing("an index");

/// Motivation: reads over the size of the cache.
pub(super) static FIGURE_3: Figure = Figure {
    name: "smart-3",
    title: "SMART, figure 3: YCSB C over the cache, one memory node, keys of 32 and values of 64 bytes, 320 clients",
    source: "Luo et al., OSDI 2023, section 3",
    axes: ["cache of a compute node for 60 M records", "million operations a second"],
    places: || vec!["0 MB", "100 MB", "200 MB", "400 MB", "600 MB"],
    unit: "M/s",
    curves: || {
        let curves = CONTENDERS.iter().flat_map(|of| {
            of.sized(of.motivation(), |load| {
                let cached = |megabytes: u64| (Load { cache_bytes: megabytes << 20, ..load }, 320);
                each([0, 100, 200, 400, 600].map(cached), mops)
            })
        });
        curves.collect()
    },
    headlines: &[
        Headline {
            curves: "ART",
            point: "600 MB, M/s",
            of: Value::On("ART", At::Place(4)),
            to: Value::Of(|| 1.0),
            published: Some(45.0),
            judged: Shape::Within(0.25),
        },
        Headline {
            curves: "Sherman",
            point: "600 MB, M/s",
            of: Value::On("Sherman", At::Place(4)),
            to: Value::Of(|| 1.0),
            published: Some(4.17),
            judged: Shape::Within(0.25),
        },
    ],
    claims: &[Claim {
        what: "without a cache, SMART reads more than one node for each leaf, and is less than half as fast",
        ratios: &[(Value::On("SMART", At::Place(0)), Value::On("SMART", At::Place(4)), Shape::Below(0.5))],
    }],
    fabrics: INDEXES,
};

/// Bytes that a read takes from memory, relative to those of its key and its value.
fn amplification(load: &Load, measured: &Measured) -> f64 {
    /// Header of an acknowledgement in bytes.
    const ACKNOWLEDGEMENT: u64 = 4;
    let [_, received] = measured.bytes;
    let record = load.keys.len_max() + load.key_padding + load.value_len;
    (received - measured.nic_ops * (PACKET + ACKNOWLEDGEMENT) as f64) / record as f64
}

/// Motivation: amplification of reads.
pub(super) static FIGURE_3_BYTES: Figure = Figure {
    name: "smart-3-bytes",
    title: "SMART, section 3: bytes that YCSB C reads for each byte of key and value, with a full cache",
    source: "Luo et al., OSDI 2023, section 3",
    axes: ["keys and values", "read amplification"],
    places: || vec!["32 + 64 B"],
    unit: "times",
    curves: || {
        let of = |of: &Contender| {
            let load = Load { cache_bytes: 1 << 40, ..of.motivation() };
            curve(of.names[0], each([(load, 8)], amplification))
        };
        CONTENDERS.iter().map(of).collect()
    },
    headlines: &[
        Headline {
            curves: "ART",
            point: "32 + 64 B",
            of: Value::On("ART", At::Place(0)),
            to: Value::Of(|| 1.0),
            published: Some(1.1),
            judged: Shape::Within(0.1),
        },
        Headline {
            curves: "Sherman",
            point: "32 + 64 B",
            of: Value::On("Sherman", At::Place(0)),
            to: Value::Of(|| 1.0),
            published: Some(33.0),
            judged: Shape::Within(0.1),
        },
    ],
    claims: &[],
    fabrics: INDEXES,
};

/// Numbers of clients of figures 11 and 12.
const LOADS: [u32; 8] = [32, 64, 128, 192, 256, 384, 512, 768];

/// The 99th percentile of the latency over throughput, with more and more clients.
fn latencies(load: Load) -> Predict {
    Predict::Points(Box::new(move |operations| {
        let bed = Bed::new(load, 1)?;
        let at = |clients: u32| {
            let measured = bed.measure(clients, operations.max(u64::from(clients) * 40))?;
            Ok(Point { x: measured.ops_per_s, y: measured.p99_us })
        };
        LOADS.into_iter().map(at).collect()
    }))
}

/// A ratio of the highest throughputs of SMART and another index in a workload.
const fn peaks(curves: &'static str, [of, to]: [&'static str; 2], ratio: f64) -> Headline {
    Headline {
        curves,
        point: "peak",
        of: Value::On(of, At::Peak),
        to: Value::On(to, At::Peak),
        published: Some(ratio),
        judged: Shape::Within(0.25),
    }
}

/// A ratio of the latencies of another index and SMART at their highest throughputs.
const fn tails(curves: &'static str, [of, to]: [&'static str; 2], ratio: f64) -> Headline {
    Headline {
        curves,
        point: "99th percentile at the peak",
        of: Value::On(of, At::AtPeak),
        to: Value::On(to, At::AtPeak),
        published: Some(ratio),
        judged: Shape::Reported("the text does not say at which load"),
    }
}

/// The curves of all workloads for all contenders.
fn by_clients(load: fn(&Contender) -> Load) -> Vec<Curve> {
    let curves = MIXES.into_iter().enumerate().flat_map(|(place, (_, mix))| {
        CONTENDERS.iter().map(move |of| curve(of.by_mix[place], latencies(Load { mix, ..load(of) })))
    });
    curves.collect()
}

/// The highest throughputs that are known of SMART, in million operations a second: of A, derived from the range of an
/// axis in the artifact's styles, at most 60; of C, 2.8 times Sherman's, which follows from the bytes of its leaves on
/// two links.
const PEAKS: [(&str, f64, Shape); 2] = [
    ("SMART, A", 47.0, Shape::Reported("derived from the range of an axis")),
    ("SMART, C", 104.0, Shape::Within(0.25)),
];

/// Throughput and latency with numbers as keys.
pub(super) static FIGURE_11: Figure = Figure {
    name: "smart-11",
    title: "SMART, figure 11: 99th percentile over throughput, numbers as keys, values of 8 bytes",
    source: "Luo et al., OSDI 2023, section 5.2",
    axes: ["million operations a second", "99th percentile of the latency, us"],
    places: Vec::new,
    unit: "us",
    curves: || {
        let mut curves = by_clients(Contender::load);
        for curve in &mut curves {
            let known = PEAKS.into_iter().filter(|(name, ..)| *name == curve.name);
            curve.published =
                known.map(|(_, value, judged)| Published { at: At::Peak, value, judged }).collect();
        }
        curves
    },
    headlines: &[
        peaks("SMART / Sherman, A", ["SMART, A", "Sherman, A"], 6.1),
        peaks("SMART / ART, A", ["SMART, A", "ART, A"], 3.4),
        peaks("SMART / Sherman, B", ["SMART, B", "Sherman, B"], 2.4),
        peaks("SMART / ART, B", ["SMART, B", "ART, B"], 1.8),
        peaks("SMART / Sherman, C", ["SMART, C", "Sherman, C"], 2.8),
        peaks("SMART / ART, C", ["SMART, C", "ART, C"], 1.2),
        tails("Sherman / SMART, A", ["Sherman, A", "SMART, A"], 1.4),
        tails("ART / SMART, A", ["ART, A", "SMART, A"], 1.3),
        tails("Sherman / SMART, B", ["Sherman, B", "SMART, B"], 1.1),
        tails("ART / SMART, B", ["ART, B", "SMART, B"], 1.7),
    ],
    claims: &[
        Claim {
            what: "on reads alone, SMART is faster than ART, and ART faster than Sherman",
            ratios: &[
                (Value::On("SMART, C", At::Peak), Value::On("ART, C", At::Peak), Shape::Above(1.0)),
                (Value::On("ART, C", At::Peak), Value::On("Sherman, C", At::Peak), Shape::Above(1.0)),
            ],
        },
        Claim {
            what: "the more updates, the slower",
            ratios: &[
                (Value::On("SMART, B", At::Peak), Value::On("SMART, C", At::Peak), Shape::Below(1.0)),
                (Value::On("SMART, A", At::Peak), Value::On("SMART, B", At::Peak), Shape::Below(1.0)),
            ],
        },
    ],
    fabrics: INDEXES,
};

/// Throughput and latency with strings as keys.
pub(super) static FIGURE_12: Figure = Figure {
    name: "smart-12",
    title: "SMART, figure 12: 99th percentile over throughput, keys of 32 bytes, values of 8 bytes",
    source: "Luo et al., OSDI 2023, section 5.2",
    axes: ["million operations a second", "99th percentile of the latency, us"],
    places: Vec::new,
    unit: "us",
    curves: || by_clients(|of| emails(of.load())),
    headlines: &[],
    claims: &[],
    fabrics: INDEXES,
};

/// Numbers of clients of figure 13.
const SCALE: [u32; 7] = [128, 256, 384, 512, 640, 768, 896];

/// Scalability of workload A.
pub(super) static FIGURE_13: Figure = Figure {
    name: "smart-13",
    title: "SMART, figure 13: YCSB A over clients, numbers as keys, values of 8 bytes",
    source: "Luo et al., OSDI 2023, section 5.2",
    axes: CLIENTS_AND_RATE,
    places: || vec!["128", "256", "384", "512", "640", "768", "896"],
    unit: "M/s",
    curves: || {
        let by_clients = |load| on_one_bed(load, 0..SCALE.len(), |_, place| SCALE[place]);
        let curves = CONTENDERS.iter().flat_map(|of| of.sized(Load { mix: Mix::A, ..of.load() }, by_clients));
        curves.collect()
    },
    headlines: &[],
    claims: &[
        Claim {
            what: "ART falls beyond 800 clients",
            ratios: &[(Value::On("ART", At::Place(6)), Value::On("ART", At::Place(5)), Shape::Below(1.0))],
        },
        Claim {
            what: "SMART does not fall beyond 800 clients",
            ratios: &[(
                Value::On("SMART", At::Place(6)),
                Value::On("SMART", At::Place(5)),
                Shape::AtLeast(0.98),
            )],
        },
    ],
    fabrics: INDEXES,
};

/// Scans over the length of values.
pub(super) static FIGURE_14: Figure = Figure {
    name: "smart-14",
    title: "SMART, figure 14: YCSB E over the length of values, scans of up to 100 records, 128 clients",
    source: "Luo et al., OSDI 2023, section 5.2",
    axes: ["bytes of a value", "million operations a second"],
    places: || vec!["8", "16", "32", "64", "128", "256"],
    unit: "M/s",
    curves: || {
        let curves = CONTENDERS.iter().flat_map(|of| {
            let load = Load { is_ordered: true, mix: Mix::E, ..of.load() };
            of.sized(load, |load| {
                each([8, 16, 32, 64, 128, 256].map(|value_len| (Load { value_len, ..load }, 128)), mops)
            })
        });
        curves.collect()
    },
    headlines: &[],
    claims: &[],
    fabrics: INDEXES,
};

/// Number of clients of figures 15 and 16.
const CLIENTS: u32 = 384;

/// The rungs of the ladder, with the names of the curves.
const LADDER: [(&str, Rung); 6] = [
    ("SMART as ART", Rung::Art),
    ("+ lock-free nodes", Rung::LockFree),
    ("+ updates in place", Rung::InPlace),
    ("+ embedded lock", Rung::EmbeddedLock),
    ("+ read delegation", Rung::ReadDelegation),
    ("+ write combining", Rung::WriteCombining),
];

/// The load of SMART with the techniques up to a rung.
const fn on_rung(load: Load, rung: Rung) -> Load {
    Load { indexing: Indexing { rung: Some(rung), ..load.indexing }, ..load }
}

/// A claim on the ratio of two rungs on a workload.
const fn rungs(of: &'static str, to: &'static str, at: At, judged: Shape) -> (Value, Value, Shape) {
    (Value::On(of, at), Value::On(to, at), judged)
}

/// Ablation: each technique with those before it.
pub(super) static FIGURE_15: Figure = Figure {
    name: "smart-15",
    title: "SMART, figure 15: each technique with those before it, numbers as keys, 384 clients",
    source: "Luo et al., OSDI 2023, section 5.3",
    axes: ["YCSB workload", "million operations a second"],
    places: || MIXES.into_iter().map(|(name, _)| name).collect(),
    unit: "M/s",
    curves: || {
        let rung = |(name, rung)| curve(name, by_mix(on_rung(SMART.load(), rung), CLIENTS));
        let mut curves: Vec<Curve> = LADDER.into_iter().map(rung).collect();
        let few = Load { records: FEW_RECORDS, ..SMART.load() };
        curves.push(curve("all, half of the records", by_mix(few, CLIENTS)));
        curves
    },
    headlines: &[],
    claims: &[
        Claim {
            what: "on A, updates in place are faster than new leaves, and so is the embedded lock than one apart",
            ratios: &[
                rungs("+ updates in place", "+ lock-free nodes", ON_A, Shape::Above(1.0)),
                rungs("+ embedded lock", "+ updates in place", ON_A, Shape::Above(1.0)),
            ],
        },
        Claim {
            what: "on C, the NICs of two memory nodes limit reads, and read delegation makes them faster",
            ratios: &[
                (Value::On("+ embedded lock", ON_C), Value::Of(|| 90.0), Shape::Below(1.001)),
                rungs("+ read delegation", "+ embedded lock", ON_C, Shape::Above(1.0)),
            ],
        },
        Claim {
            what: "on A, write combining is faster than read delegation alone",
            ratios: &[rungs("+ write combining", "+ read delegation", ON_A, Shape::Above(1.0))],
        },
    ],
    fabrics: INDEXES,
};

/// Lock schemes: a lock apart from the leaf, one at its end, and combined writers.
pub(super) static FIGURE_16: Figure = Figure {
    name: "smart-16",
    title: "SMART, figure 16: YCSB A by lock schemes, numbers as keys, 384 clients",
    source: "Luo et al., OSDI 2023, section 5.3",
    axes: ["lock scheme", "million operations a second"],
    places: || vec!["HOCL", "E-HOCL", "RDWC"],
    unit: "M/s",
    curves: || {
        let schemes = |load: Load| {
            let rungs = [Rung::InPlace, Rung::EmbeddedLock, Rung::WriteCombining];
            each(rungs.map(|rung| (on_rung(load, rung), CLIENTS)), mops)
        };
        SMART.sized(Load { mix: Mix::A, ..SMART.load() }, schemes).collect()
    },
    headlines: &[],
    claims: &[Claim {
        what: "a lock in the leaf is faster than one apart, and combined writers are faster still",
        ratios: &[
            (Value::On("SMART", At::Place(1)), Value::On("SMART", At::Place(0)), Shape::Above(1.0)),
            (Value::On("SMART", At::Place(2)), Value::On("SMART", At::Place(1)), Shape::Above(1.0)),
        ],
    }],
    fabrics: INDEXES,
};

/// Hits of the cache over its size. A lookup that misses READs inner nodes before the leaf.
pub(super) static FIGURE_17: Figure = Figure {
    name: "smart-17",
    title: "SMART, figure 17: share of READs that fetch a leaf over the cache, YCSB C, numbers as keys, 384 clients",
    source: "Luo et al., OSDI 2023, section 5.3",
    axes: ["cache of a compute node for 60 M records", "share of READs that fetch a leaf"],
    places: || vec!["150 MB", "200 MB", "250 MB", "300 MB", "600 MB", "6000 MB"],
    unit: "of 1",
    curves: || {
        let curves = CONTENDERS.iter().flat_map(|of| {
            of.sized(of.load(), |load| {
                let cached = |megabytes: u64| (Load { cache_bytes: megabytes << 20, ..load }, CLIENTS);
                each([150, 200, 250, 300, 600, 6_000].map(cached), |_, measured| measured.leaf_share())
            })
        });
        curves.collect()
    },
    headlines: &[],
    claims: &[Claim {
        what: "a larger cache has more hits",
        ratios: &[(Value::On("SMART", At::Place(3)), Value::On("SMART", At::Place(0)), Shape::Above(1.0))],
    }],
    fabrics: INDEXES,
};

/// Number of clients of figure 18.
const FEW_CLIENTS: u32 = 256;
const SKEWS: [f64; 6] = [0.5, 0.6, 0.7, 0.8, 0.9, 0.99];

/// Skew of the records, with and without read delegation and write combining.
pub(super) static FIGURE_18: Figure = Figure {
    name: "smart-18",
    title: "SMART, figure 18a: YCSB A over the Zipf coefficient, numbers as keys, 256 clients",
    source: "Luo et al., OSDI 2023, section 5.3",
    axes: ["Zipf coefficient", "million operations a second"],
    places: || vec!["0.5", "0.6", "0.7", "0.8", "0.9", "0.99"],
    unit: "M/s",
    curves: || {
        let skewed = |load: Load| {
            on_one_bed(load, 0..SKEWS.len(), |bed, place| {
                bed.set_skew(SKEWS[place]);
                FEW_CLIENTS
            })
        };
        let all = |of: &Contender| Load { mix: Mix::A, ..of.load() };
        let mut curves: Vec<Curve> = CONTENDERS.iter().flat_map(|of| of.sized(all(of), skewed)).collect();
        curves.push(curve(APART, skewed(on_rung(all(SMART), Rung::EmbeddedLock))));
        curves
    },
    headlines: &[],
    claims: &[Claim {
        what: "read delegation and write combining help at 0.99, and no more at 0.5",
        ratios: &[
            (Value::On("SMART", At::Place(5)), Value::On(APART, At::Place(5)), Shape::Above(1.1)),
            (Value::On("SMART", At::Place(0)), Value::On(APART, At::Place(0)), Shape::Within(0.05)),
        ],
    }],
    fabrics: INDEXES,
};

const APART: &str = "SMART, each operation by itself";

/// Length of keys.
pub(super) static FIGURE_18_KEYS: Figure = Figure {
    name: "smart-18-keys",
    title: "SMART, figure 18b: YCSB C over the length of keys, values of 8 bytes, 256 clients, ample cache",
    source: "Luo et al., OSDI 2023, section 5.3",
    axes: ["bytes of a key", "million operations a second"],
    places: || vec!["8", "32", "64", "128"],
    unit: "M/s",
    curves: || {
        let curves = CONTENDERS.iter().flat_map(|of| {
            // The artifact's cache for this figure.
            of.sized(Load { cache_bytes: 6_000 << 20, ..of.load() }, |load| {
                let longer = |more: usize| {
                    let load = emails(load);
                    (Load { key_padding: load.key_padding + more, ..load }, FEW_CLIENTS)
                };
                each([(load, FEW_CLIENTS), longer(0), longer(64 - EMAIL), longer(128 - EMAIL)], mops)
            })
        });
        curves.collect()
    },
    headlines: &[],
    claims: &[],
    fabrics: INDEXES,
};

/// Length of values.
pub(super) static FIGURE_18_VALUES: Figure = Figure {
    name: "smart-18-values",
    title: "SMART, figure 18c: YCSB C over the length of values, numbers as keys, 256 clients",
    source: "Luo et al., OSDI 2023, section 5.3",
    axes: ["bytes of a value", "million operations a second"],
    places: || vec!["8", "64", "128", "256", "512", "1024"],
    unit: "M/s",
    curves: || {
        let curves = CONTENDERS.iter().flat_map(|of| {
            of.sized(of.load(), |load| {
                let long = |value_len| (Load { value_len, ..load }, FEW_CLIENTS);
                each([8, 64, 128, 256, 512, 1024].map(long), mops)
            })
        });
        curves.collect()
    },
    headlines: &[],
    claims: &[Claim {
        what: "the throughput is flat up to values of 64 bytes, and falls with longer ones",
        ratios: &[
            (Value::On("SMART", At::Place(1)), Value::On("SMART", At::Place(0)), Shape::AtLeast(0.9)),
            (Value::On("SMART", At::Place(5)), Value::On("SMART", At::Place(0)), Shape::Below(0.5)),
        ],
    }],
    fabrics: INDEXES,
};
