//! Figures of Luo et al., *SMART: A High-Performance Adaptive Radix Tree for Disaggregated Memory* (OSDI 2023).
//!
//! The curves of the paper are not available, only some ratios that its text states, and the parameters of its
//! experiments, which its artifact has (`exp/params`). A *client* is a thread, and has two operations in flight.
//!
//! Invariant: all systems have the same machines, the same cache and the same numbers of clients.
//! Invariant: no ratio to a rival is printed unless the rival meets its own published or derived numbers.

use super::{
    At, Claim, Curve, Figure, Headline, OnFabrics, Point, Predict, Published, Rivals, Row, Shape, Value,
    together,
};
use farside_bench::index::NameKind;
use farside_predict::index::{Bed, Load, Measured, Mix};
use farside_sim::hardware::{CONNECTX_6, Inputs, PACKET, Testbed};
use farside_systems::index::{Indexing, Rung, Versions};
use farside_systems::system::Options;

/// An index that the figures compare, with the names of its curves.
struct Contender {
    kind: &'static str,
    /// Options of the store.
    indexing: Indexing,
    /// Name of the curve of the model with [`RECORDS`] and with [`FEW_RECORDS`].
    names: [&'static str; 2],
    /// Names of the curves of each workload, in the order of [`MIXES`].
    by_mix: [&'static str; 5],
}

/// The machines of the model do not fail, and those of the paper neither.
const NO_REDO: Indexing = Indexing { redo: Some(false), ..Indexing::NONE };

/// The indexes that the figures compare.
static CONTENDERS: [Contender; 3] = [
    Contender {
        kind: "smart",
        indexing: NO_REDO,
        names: ["SMART", "SMART, half of the records"],
        by_mix: ["SMART, LOAD", "SMART, A", "SMART, B", "SMART, C", "SMART, D"],
    },
    Contender {
        kind: "art",
        indexing: NO_REDO,
        names: ["ART", "ART, half of the records"],
        by_mix: ["ART, LOAD", "ART, A", "ART, B", "ART, C", "ART, D"],
    },
    Contender {
        kind: "sherman",
        // Lines are those of RDMA, and locks as many as in the artifact. With versions of 4 bits, as in the paper,
        // each READ that takes 8 us or longer is repeated: under load, all of them.
        indexing: Indexing { locks: Some(32_768), versions: Some(Versions { line: 64, bits: 8 }), ..NO_REDO },
        names: ["Sherman", "Sherman, half of the records"],
        by_mix: ["Sherman, LOAD", "Sherman, A", "Sherman, B", "Sherman, C", "Sherman, D"],
    },
];
/// The index whose techniques and locks are figures of their own.
static SMART: &Contender = &CONTENDERS[0];

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
/// A cache that has room for all nodes.
const AMPLE: u64 = 6_000 << 20;

const UNPUBLISHED: &str = "the published curve is not available";

impl Contender {
    /// The load of most figures: numbers as keys, values of 8 bytes, two memory nodes.
    const fn load(&self) -> Load {
        Load {
            system: self.kind,
            indexing: self.indexing,
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
        let clients_max = MOTIVATION_CLIENTS;
        Load { testbed, members: 1, clients_max, value_len: VALUE, ..emails(self.load()) }
    }

    /// The curve of this contender, and that of SMART also with fewer records. `predict` returns the prediction of a
    /// load.
    fn sized(&self, load: Load, predict: impl Fn(Load) -> Predict) -> impl Iterator<Item = Curve> {
        let [many, few] = self.names;
        let is_smart = self.kind == SMART.kind;
        let fewer = is_smart.then(|| curve(few, predict(Load { records: FEW_RECORDS, ..load })));
        [curve(many, predict(load))].into_iter().chain(fewer)
    }
}

/// The load with versions of 16 bits, if the index has versions: for READs that take longer than 8 bits permit.
const fn with_long_reads(load: Load) -> Load {
    let Some(versions) = load.indexing.versions else { return load };
    let versions = Some(Versions { bits: 16, ..versions });
    Load { indexing: Indexing { versions, ..load.indexing }, ..load }
}

/// Length of a key of the paper's that is a string, in bytes.
const EMAIL: usize = 32;
/// Length of a value of the motivation, in bytes.
const VALUE: usize = 64;
/// Number of clients of the motivation's figures, half of the largest number of the artifact's. They keep the memory
/// node's NIC busy. With more of them, a READ of Sherman takes longer than the versions of a leaf permit.
const MOTIVATION_CLIENTS: u32 = 160;

/// The load with e-mail addresses as keys, as long as the paper's.
const fn emails(load: Load) -> Load {
    Load { keys: NameKind::Emails, key_padding: EMAIL - NameKind::Emails.len_max(), ..load }
}

fn curve(name: &'static str, predict: Predict) -> Curve {
    Curve { name, predict, published: Vec::new(), unpublished: UNPUBLISHED }
}

/// Measures a point of a curve: at least two times the operations, or of scans fewer.
fn measure(bed: &Bed, load: &Load, clients: u32, operations: u64) -> Result<Measured, String> {
    /// Mean number of records of a scan.
    const SCANNED: u64 = 50;
    let in_flight = u64::from(clients * load.coroutines);
    match load.mix.scans > 0.0 {
        true => bed.measure(clients, (operations / SCANNED).max(in_flight * 2)),
        false => bed.measure(clients, (operations / 2).max(in_flight * 8)),
    }
}

/// Predicts a value for each place, which has its own load and its own number of clients.
fn each<const N: usize>(places: [(Load, u32); N], value: fn(&Load, &Measured) -> f64) -> Predict {
    Predict::Found(Box::new(move |place, operations| {
        let (load, clients) = places[place];
        let measured = measure(&Bed::new(load, 1)?, &load, clients, operations)?;
        Ok(value(&load, &measured))
    }))
}

/// Predicts a value for each place, whose measurement `prepare` prepares on one bed. Returns the number of clients.
fn on_one_bed(
    load: Load,
    order: impl Iterator<Item = usize> + Clone + 'static,
    prepare: impl Fn(&mut Bed, usize) -> Result<u32, String> + 'static,
    value: fn(&Load, &Measured) -> f64,
) -> Predict {
    Predict::Points(Box::new(move |operations| {
        let mut bed = Bed::new(load, 1)?;
        let at = |place: usize| {
            let clients = prepare(&mut bed, place)?;
            let measured = measure(&bed, &load, clients, operations)?;
            Ok(Point { x: place as f64, y: value(&load, &measured) })
        };
        let mut points: Vec<Point> = order.clone().map(at).collect::<Result<_, String>>()?;
        points.sort_by(|one, other| one.x.total_cmp(&other.x));
        Ok(points)
    }))
}

/// Predicts a value for each size of the cache, in megabytes of the paper's, on one bed.
fn by_cache<const N: usize>(
    load: Load,
    megabytes: [u64; N],
    clients: u32,
    value: fn(&Load, &Measured) -> f64,
) -> Predict {
    let load = Load { cache_bytes: megabytes[0] << 20, ..load };
    let prepare = move |bed: &mut Bed, place: usize| {
        bed.set_cache(megabytes[place] << 20)?;
        Ok(clients)
    };
    on_one_bed(load, 0..N, prepare, value)
}

fn mops(_load: &Load, measured: &Measured) -> f64 {
    measured.ops_per_s / 1e6
}

/// Workloads of the figures, in the order of their places, with their names.
const MIXES: [(&str, Mix); 5] =
    [("LOAD", Mix::LOAD), ("A", Mix::A), ("B", Mix::B), ("C", Mix::C), ("D", Mix::D)];
/// Order in which the workloads are measured on one bed: those that insert come last.
const MIX_ORDER: [usize; 5] = [3, 2, 1, 4, 0];
const ON_A: At = At::Place(1);
const ON_C: At = At::Place(3);

/// Predicts the throughput of each workload on one bed.
fn by_mix(load: Load, clients: u32) -> Predict {
    let prepare = move |bed: &mut Bed, place: usize| {
        bed.set_mix(MIXES[place].1)?;
        Ok(clients)
    };
    on_one_bed(load, MIX_ORDER.into_iter(), prepare, mops)
}

const CLIENTS_AND_RATE: [&str; 2] = ["clients", "million operations a second"];
/// Default fields of the figures.
const DEFAULTS: Figure = Figure {
    name: "",
    title: "",
    source: "Luo et al., OSDI 2023, section 5.3",
    axes: CLIENTS_AND_RATE,
    places: Vec::new,
    unit: "M/s",
    curves: Vec::new,
    headlines: &[],
    claims: &[],
    rivals: None,
    fabrics: OnFabrics::Nothing("an index"),
};

/// Motivation: reads over the size of the cache.
pub(super) static FIGURE_3: Figure = Figure {
    name: "smart-3",
    title: "SMART, figure 3: YCSB C over the cache, one memory node, keys of 32 and values of 64 bytes, 160 clients",
    source: "Luo et al., OSDI 2023, section 3",
    axes: ["cache of a compute node for 60 M records", "million operations a second"],
    places: || vec!["0 MB", "100 MB", "200 MB", "400 MB", "600 MB"],
    curves: || {
        let curves = CONTENDERS.iter().flat_map(|of| {
            of.sized(of.motivation(), |load| {
                by_cache(load, [0, 100, 200, 400, 600], MOTIVATION_CLIENTS, mops)
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
            published: Some(ART_A_NODE),
            judged: Shape::Within(0.25),
        },
        Headline {
            curves: "Sherman",
            point: "600 MB, M/s",
            of: Value::On("Sherman", At::Place(4)),
            to: Value::Of(|| 1.0),
            published: Some(SHERMAN_MOTIVATION),
            judged: Shape::Within(0.25),
        },
    ],
    claims: &[Claim {
        what: "without a cache, SMART reads more than one node for each leaf, and is less than half as fast",
        ratios: &[(Value::On("SMART", At::Place(0)), Value::On("SMART", At::Place(4)), Shape::Below(0.5))],
    }],
    ..DEFAULTS
};

/// Peaks of YCSB C on the motivation's machines, in million operations a second (section 3).
const ART_A_NODE: f64 = 45.0;
const SHERMAN_MOTIVATION: f64 = 4.17;
/// Peak of Sherman's reads on two memory nodes with keys and values of 8 bytes, in million a second. Derived: two links
/// of 12.5 GB/s carry leaves of 623 bytes with 50 bytes of headers.
const SHERMAN_LEAVES: f64 = 37.0;

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
            let records = RECORDS / 16;
            let load = Load { cache_bytes: 1 << 40, records, ..of.motivation() };
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
    ..DEFAULTS
};

/// Numbers of clients of figure 11, and of figure 12, which has no published numbers.
const LOADS: &[u32] = &[32, 128, 256, 512, 768];
const FEW_LOADS: &[u32] = &[64, 256, 768];

/// The 99th percentile of the latency over throughput, with more and more clients, for each workload.
fn latencies(load: Load, loads: &'static [u32]) -> [Predict; MIXES.len()] {
    together(move |operations| {
        let mut bed = Bed::new(load, 1)?;
        let mut curves = [const { Vec::new() }; MIXES.len()];
        for place in MIX_ORDER {
            bed.set_mix(MIXES[place].1)?;
            for &clients in loads {
                let measured = measure(&bed, &load, clients, operations)?;
                curves[place].push(Point { x: measured.ops_per_s, y: measured.p99_us });
            }
        }
        Ok(curves)
    })
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
        of: Value::On(of, At::LatencyAtPeak),
        to: Value::On(to, At::LatencyAtPeak),
        published: Some(ratio),
        judged: Shape::Reported("the text does not say at which load"),
    }
}

/// A ratio of the highest throughputs of an index in workloads C and A.
const fn drop_by_updates(curves: &'static str, [on_c, on_a]: [&'static str; 2]) -> Headline {
    Headline {
        curves,
        point: "peak",
        of: Value::On(on_c, At::Peak),
        to: Value::On(on_a, At::Peak),
        published: Some(7.4),
        judged: Shape::Reported("the text has it for Sherman, and the artifact for ART without a cache"),
    }
}

/// A claim that the peak of one curve is higher than that of another one.
const fn faster(one: &'static str, other: &'static str) -> (Value, Value, Shape) {
    (Value::On(one, At::Peak), Value::On(other, At::Peak), Shape::Above(1.0))
}

/// A claim that the latency at the peak of one curve is higher than at the peak of another one.
const fn later(one: &'static str, other: &'static str) -> (Value, Value, Shape) {
    (Value::On(one, At::LatencyAtPeak), Value::On(other, At::LatencyAtPeak), Shape::Above(1.0))
}

/// The curves of all workloads for all contenders.
fn by_clients(load: fn(&Contender) -> Load, loads: &'static [u32]) -> Vec<Curve> {
    let curves = CONTENDERS.iter().flat_map(|of| {
        of.by_mix.into_iter().zip(latencies(load(of), loads)).map(|(name, predict)| curve(name, predict))
    });
    curves.collect()
}

/// The highest throughputs that are known, in million operations a second: of SMART on A, derived from the range of an
/// axis in the artifact's styles, at most 60; of SMART on C, 2.8 times Sherman's.
const PEAKS: [(&str, f64, Shape); 4] = [
    ("SMART, A", 47.0, Shape::Reported("derived from the range of an axis")),
    ("SMART, C", 104.0, Shape::Within(0.25)),
    ("Sherman, C", SHERMAN_LEAVES, Shape::Within(0.25)),
    ("ART, C", 2.0 * ART_A_NODE, Shape::Within(0.25)),
];

/// Measures what the rivals cost by themselves, and the peaks of their reads on the motivation's machines.
fn rivals(operations: u64) -> Result<Vec<Row>, String> {
    const RIVALS: [(&str, f64); 2] = [("ART", ART_A_NODE), ("Sherman", SHERMAN_MOTIVATION)];
    let mut rows = Vec::new();
    for of in &CONTENDERS {
        let rival = RIVALS.into_iter().find(|(name, _)| *name == of.names[0]);
        let Some((name, peak)) = rival else { continue };
        let mut row = |point: &str, unit, published, predicted, share| {
            rows.push(Row {
                curve: name,
                point: point.to_owned(),
                unit,
                published: Some(published),
                predicted: Some(predicted),
                judged: Shape::Within(share),
            });
        };
        let few = Load { coroutines: 1, records: RECORDS / 16, cache_bytes: 1 << 40, skew: 0.0, ..of.load() };
        let mut bed = Bed::new(few, 1)?;
        let get = bed.measure(1, 1_000)?;
        bed.set_mix(Mix::of_reads(0.0))?;
        let update = bed.measure(1, 1_000)?;
        row("verbs of a get", "verbs", 1.0, get.nic_ops, 0.05);
        row("waves of an update", "gets", 3.0, update.mean_us / get.mean_us, 0.1);
        let load = of.motivation();
        let measured = measure(&Bed::new(load, 1)?, &load, MOTIVATION_CLIENTS, operations)?;
        row("C, one memory node, 32 + 64 B", "M/s", peak, mops(&load, &measured), 0.25);
    }
    Ok(rows)
}

/// Throughput and latency with numbers as keys.
pub(super) static FIGURE_11: Figure = Figure {
    name: "smart-11",
    title: "SMART, figure 11: 99th percentile over throughput, numbers as keys, values of 8 bytes",
    source: "Luo et al., OSDI 2023, section 5.2",
    axes: ["million operations a second", "99th percentile of the latency, us"],
    places: Vec::new,
    unit: "us",
    curves: || {
        let mut curves = by_clients(Contender::load, LOADS);
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
        tails("Sherman / SMART, C", ["Sherman, C", "SMART, C"], 1.0),
        tails("ART / SMART, C", ["ART, C", "SMART, C"], 1.0),
        drop_by_updates("Sherman, C / A", ["Sherman, C", "Sherman, A"]),
        drop_by_updates("ART, C / A", ["ART, C", "ART, A"]),
    ],
    claims: &[
        Claim {
            what: "on reads alone, SMART is faster than ART, and ART faster than Sherman",
            ratios: &[faster("SMART, C", "ART, C"), faster("ART, C", "Sherman, C")],
        },
        Claim {
            what: "on A, SMART is faster than ART, and ART faster than Sherman",
            ratios: &[faster("SMART, A", "ART, A"), faster("ART, A", "Sherman, A")],
        },
        Claim {
            what: "on B, SMART is faster than ART, and ART faster than Sherman",
            ratios: &[faster("SMART, B", "ART, B"), faster("ART, B", "Sherman, B")],
        },
        Claim {
            what: "on A, B and C, SMART is faster than Sherman",
            ratios: &[
                faster("SMART, A", "Sherman, A"),
                faster("SMART, B", "Sherman, B"),
                faster("SMART, C", "Sherman, C"),
            ],
        },
        Claim {
            what: "on A and B, Sherman's 99th percentile at the peak is higher than SMART's",
            ratios: &[later("Sherman, A", "SMART, A"), later("Sherman, B", "SMART, B")],
        },
        Claim {
            what: "on A and B, ART's 99th percentile at the peak is higher than SMART's",
            ratios: &[later("ART, A", "SMART, A"), later("ART, B", "SMART, B")],
        },
        Claim {
            what: "the more updates, the slower are SMART and Sherman",
            ratios: &[
                faster("SMART, C", "SMART, B"),
                faster("SMART, B", "SMART, A"),
                faster("Sherman, C", "Sherman, B"),
                faster("Sherman, B", "Sherman, A"),
            ],
        },
        Claim {
            what: "the more updates, the slower is ART",
            ratios: &[faster("ART, C", "ART, B"), faster("ART, B", "ART, A")],
        },
    ],
    rivals: Some(Rivals { names: &["ART", "Sherman"], numbers: rivals }),
    ..DEFAULTS
};

/// Share of the time in which the NICs of the memory nodes start ops, and in which their links carry bytes.
fn limits(load: Load, clients: u32) -> Predict {
    Predict::Points(Box::new(move |operations| {
        let busy = measure(&Bed::new(load, 1)?, &load, clients, operations)?.busy;
        let points = [busy.ops, busy.link].into_iter().enumerate();
        Ok(points.map(|(place, y)| Point { x: place as f64, y }).collect())
    }))
}

/// Utilization of the memory nodes' NICs and links by reads.
pub(super) static FIGURE_11_LIMITS: Figure = Figure {
    name: "smart-11-limits",
    title: "SMART, figure 11, YCSB C: share of the time in which the memory nodes are busy, 256 clients, ample cache",
    source: "Luo et al., OSDI 2023, sections 3 and 5.2",
    axes: ["part of the memory nodes", "share of the time"],
    places: || vec!["the NICs start ops", "the links carry bytes"],
    unit: "of 1",
    curves: || {
        let of = |of: &Contender| {
            let load = Load { cache_bytes: AMPLE, ..of.load() };
            curve(of.names[0], limits(load, FEW_CLIENTS))
        };
        CONTENDERS.iter().map(of).collect()
    },
    claims: &[
        Claim {
            what: "bandwidth limits Sherman's reads",
            ratios: &[
                (Value::On("Sherman", At::Place(1)), Value::On("Sherman", At::Place(0)), Shape::Above(1.0)),
                (Value::On("Sherman", At::Place(1)), Value::Of(|| 1.0), Shape::AtLeast(0.9)),
            ],
        },
        Claim {
            what: "the ops of the NICs limit ART's reads",
            ratios: &[
                (Value::On("ART", At::Place(0)), Value::On("ART", At::Place(1)), Shape::Above(1.0)),
                (Value::On("ART", At::Place(0)), Value::Of(|| 1.0), Shape::AtLeast(0.9)),
            ],
        },
    ],
    ..DEFAULTS
};

/// Throughput and latency with strings as keys.
pub(super) static FIGURE_12: Figure = Figure {
    name: "smart-12",
    title: "SMART, figure 12: 99th percentile over throughput, keys of 32 bytes, values of 8 bytes",
    source: "Luo et al., OSDI 2023, section 5.2",
    axes: ["million operations a second", "99th percentile of the latency, us"],
    places: Vec::new,
    unit: "us",
    curves: || by_clients(|of| emails(of.load()), FEW_LOADS),
    ..DEFAULTS
};

/// Numbers of clients of figure 13.
const SCALE: [u32; 7] = [128, 256, 384, 512, 640, 768, 896];

/// Scalability of workload A.
pub(super) static FIGURE_13: Figure = Figure {
    name: "smart-13",
    title: "SMART, figure 13: YCSB A over clients, numbers as keys, values of 8 bytes",
    source: "Luo et al., OSDI 2023, section 5.2",
    places: || vec!["128", "256", "384", "512", "640", "768", "896"],
    curves: || {
        let by_clients = |load| on_one_bed(load, 0..SCALE.len(), |_, place| Ok(SCALE[place]), mops);
        let curves = CONTENDERS.iter().flat_map(|of| of.sized(Load { mix: Mix::A, ..of.load() }, by_clients));
        curves.collect()
    },
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
    ..DEFAULTS
};

/// Scans over the length of values.
pub(super) static FIGURE_14: Figure = Figure {
    name: "smart-14",
    title: "SMART, figure 14: YCSB E over the length of values, scans of up to 100 records, 128 clients",
    source: "Luo et al., OSDI 2023, section 5.2",
    axes: ["bytes of a value", "million operations a second"],
    places: || vec!["8", "16", "32", "64", "128", "256"],
    curves: || {
        let curves = CONTENDERS.iter().map(|of| {
            let load = Load { is_ordered: true, mix: Mix::E, records: FEW_RECORDS, ..of.load() };
            let load = with_long_reads(load);
            let places = [8, 16, 32, 64, 128, 256].map(|value_len| (Load { value_len, ..load }, 128));
            curve(of.names[1], each(places, mops))
        });
        curves.collect()
    },
    ..DEFAULTS
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
    axes: ["YCSB workload", "million operations a second"],
    places: || MIXES.into_iter().map(|(name, _)| name).collect(),
    curves: || {
        let rung = |(name, rung)| curve(name, by_mix(on_rung(SMART.load(), rung), CLIENTS));
        let mut curves: Vec<Curve> = LADDER.into_iter().map(rung).collect();
        let few = Load { records: FEW_RECORDS, ..SMART.load() };
        curves.push(curve("all, half of the records", by_mix(few, CLIENTS)));
        curves
    },
    claims: &[
        Claim {
            what: "on A, updates in place are faster than new leaves, and so is the embedded lock than one apart",
            ratios: &[
                rungs("+ updates in place", "+ lock-free nodes", ON_A, Shape::Above(1.0)),
                rungs("+ embedded lock", "+ updates in place", ON_A, Shape::Above(1.0)),
            ],
        },
        Claim {
            what: "on C, the NICs of two memory nodes limit reads to 90 M/s",
            ratios: &[(Value::On("+ embedded lock", ON_C), Value::Of(|| 90.0), Shape::Below(1.001))],
        },
        Claim {
            what: "on C, read delegation beats 90 M/s",
            ratios: &[(Value::On("+ read delegation", ON_C), Value::Of(|| 90.0), Shape::Above(1.0))],
        },
        Claim {
            what: "on A, write combining is faster than read delegation alone",
            ratios: &[rungs("+ write combining", "+ read delegation", ON_A, Shape::Above(1.0))],
        },
    ],
    ..DEFAULTS
};

/// Lock schemes: a lock apart from the leaf, one at its end, and combined writers.
pub(super) static FIGURE_16: Figure = Figure {
    name: "smart-16",
    title: "SMART, figure 16: YCSB A by lock schemes, numbers as keys, 384 clients",
    axes: ["lock scheme", "million operations a second"],
    places: || vec!["HOCL", "E-HOCL", "RDWC"],
    curves: || {
        let schemes = |load: Load| {
            let rungs = [Rung::InPlace, Rung::EmbeddedLock, Rung::WriteCombining];
            each(rungs.map(|rung| (on_rung(load, rung), CLIENTS)), mops)
        };
        SMART.sized(Load { mix: Mix::A, ..SMART.load() }, schemes).collect()
    },
    claims: &[Claim {
        what: "a lock in the leaf is faster than one apart, and combined writers are faster still",
        ratios: &[
            (Value::On("SMART", At::Place(1)), Value::On("SMART", At::Place(0)), Shape::Above(1.0)),
            (Value::On("SMART", At::Place(2)), Value::On("SMART", At::Place(1)), Shape::Above(1.0)),
        ],
    }],
    ..DEFAULTS
};

/// Hits of the cache over its size. A lookup that misses READs inner nodes before the leaf.
pub(super) static FIGURE_17: Figure = Figure {
    name: "smart-17",
    title: "SMART, figure 17: share of READs that fetch a leaf over the cache, YCSB C, numbers as keys, 384 clients",
    axes: ["cache of a compute node for 60 M records", "share of READs that fetch a leaf"],
    places: || vec!["150 MB", "200 MB", "250 MB", "300 MB", "600 MB", "6000 MB"],
    unit: "of 1",
    curves: || {
        let curves = CONTENDERS.iter().flat_map(|of| {
            of.sized(of.load(), |load| {
                by_cache(load, [150, 200, 250, 300, 600, 6_000], CLIENTS, |_, measured| measured.leaf_share())
            })
        });
        curves.collect()
    },
    claims: &[Claim {
        what: "a larger cache has more hits",
        ratios: &[(Value::On("SMART", At::Place(3)), Value::On("SMART", At::Place(0)), Shape::Above(1.0))],
    }],
    ..DEFAULTS
};

/// Number of clients of figure 18.
const FEW_CLIENTS: u32 = 256;
const SKEWS: [f64; 6] = [0.5, 0.6, 0.7, 0.8, 0.9, 0.99];

/// Skew of the records, with and without read delegation and write combining.
pub(super) static FIGURE_18: Figure = Figure {
    name: "smart-18",
    title: "SMART, figure 18a: YCSB A over the Zipf coefficient, numbers as keys, 256 clients",
    axes: ["Zipf coefficient", "million operations a second"],
    places: || vec!["0.5", "0.6", "0.7", "0.8", "0.9", "0.99"],
    curves: || {
        let skewed = |load: Load| {
            let prepare = |bed: &mut Bed, place: usize| {
                bed.set_skew(SKEWS[place]);
                Ok(FEW_CLIENTS)
            };
            on_one_bed(load, 0..SKEWS.len(), prepare, mops)
        };
        let all = |of: &Contender| Load { mix: Mix::A, ..of.load() };
        let mut curves: Vec<Curve> = CONTENDERS.iter().flat_map(|of| of.sized(all(of), skewed)).collect();
        curves.push(curve(APART, skewed(on_rung(all(SMART), Rung::EmbeddedLock))));
        curves
    },
    claims: &[Claim {
        what: "read delegation and write combining help at 0.99, and no more at 0.5",
        ratios: &[
            (Value::On("SMART", At::Place(5)), Value::On(APART, At::Place(5)), Shape::Above(1.1)),
            (Value::On("SMART", At::Place(0)), Value::On(APART, At::Place(0)), Shape::Within(0.05)),
        ],
    }],
    ..DEFAULTS
};

const APART: &str = "SMART, each operation by itself";

/// Length of keys.
pub(super) static FIGURE_18_KEYS: Figure = Figure {
    name: "smart-18-keys",
    title: "SMART, figure 18b: YCSB C over the length of keys, values of 8 bytes, 256 clients, ample cache",
    axes: ["bytes of a key", "million operations a second"],
    places: || vec!["8", "32", "64", "128"],
    curves: || {
        let curves = CONTENDERS.iter().map(|of| {
            // The artifact's cache for this figure.
            let load = Load { cache_bytes: AMPLE, records: FEW_RECORDS, ..of.load() };
            let longer = |more: usize| {
                let load = emails(load);
                (Load { key_padding: load.key_padding + more, ..load }, FEW_CLIENTS)
            };
            let places = [(load, FEW_CLIENTS), longer(0), longer(64 - EMAIL), longer(128 - EMAIL)];
            curve(of.names[1], each(places, mops))
        });
        curves.collect()
    },
    ..DEFAULTS
};

/// Length of values.
pub(super) static FIGURE_18_VALUES: Figure = Figure {
    name: "smart-18-values",
    title: "SMART, figure 18c: YCSB C over the length of values, numbers as keys, 256 clients",
    axes: ["bytes of a value", "million operations a second"],
    places: || vec!["8", "64", "128", "256", "512", "1024"],
    curves: || {
        let curves = CONTENDERS.iter().map(|of| {
            let load = with_long_reads(Load { records: FEW_RECORDS, ..of.load() });
            let long = |value_len| (Load { value_len, ..load }, FEW_CLIENTS);
            curve(of.names[1], each([8, 64, 128, 256, 512, 1024].map(long), mops))
        });
        curves.collect()
    },
    claims: &[
        Claim {
            what: "SMART's throughput is flat up to values of 64 bytes, and falls with longer ones",
            ratios: &[
                (Value::On(HALF, At::Place(1)), Value::On(HALF, At::Place(0)), Shape::AtLeast(0.9)),
                (Value::On(HALF, At::Place(5)), Value::On(HALF, At::Place(0)), Shape::Below(0.5)),
            ],
        },
        Claim {
            what: "Sherman's throughput falls with values of 64 bytes already",
            ratios: &[(
                Value::On("Sherman, half of the records", At::Place(1)),
                Value::On("Sherman, half of the records", At::Place(0)),
                Shape::Below(0.5),
            )],
        },
    ],
    ..DEFAULTS
};

const HALF: &str = "SMART, half of the records";

/// The NIC of [`CONNECTX_6`], which takes a list of verbs as one op.
const LISTS: Inputs = Inputs { lists_are_ops: true, ..CONNECTX_6 };

/// Bytes of the cache that this release and the artifact take for a record, both calculated.
const CACHED: [u64; 2] = [30, 15];

/// Curves of all contenders whose caches have room for as many nodes of SMART as in the artifact.
const AS_MANY_NODES: [&str; 3] =
    ["SMART, as many nodes cached", "ART, as many nodes cached", "Sherman, the same cache"];

/// A ratio of two contenders in the experiment with the cache.
const fn experiment(
    curves: &'static str,
    point: &'static str,
    at: At,
    [of, to]: [usize; 2],
    ratio: f64,
) -> Headline {
    Headline {
        curves,
        point,
        of: Value::On(AS_MANY_NODES[of], at),
        to: Value::On(AS_MANY_NODES[to], at),
        published: Some(ratio),
        judged: Shape::Reported("an experiment, to which a miss is attributed"),
    }
}

/// One experiment for each miss: what it depends on.
pub(super) static MISSES: Figure = Figure {
    name: "smart-misses",
    title: "SMART: what the misses of figures 11 and 15 depend on, numbers as keys, 768 clients",
    source: "Luo et al., OSDI 2023, section 5",
    axes: ["YCSB workload", "million operations a second"],
    places: || vec!["A", "C"],
    curves: || {
        let of = |name, load: Load| {
            let prepare = |bed: &mut Bed, place: usize| {
                bed.set_mix([Mix::A, Mix::C][place])?;
                Ok(768)
            };
            curve(name, on_one_bed(load, [1, 0].into_iter(), prepare, mops))
        };
        let smart = SMART.load();
        let with_redo = Indexing { redo: Some(true), ..smart.indexing };
        let mut curves = vec![
            of("SMART", smart),
            of("SMART, with redo records", Load { indexing: with_redo, ..smart }),
            of("SMART, a list is one op", Load { inputs: LISTS, ..smart }),
        ];
        for (name, contender) in AS_MANY_NODES.into_iter().zip(&CONTENDERS) {
            curves.push(of(name, Load { cache_bytes: CACHE * CACHED[0] / CACHED[1], ..contender.load() }));
        }
        let both = Load { inputs: LISTS, cache_bytes: CACHE * CACHED[0] / CACHED[1], ..smart };
        curves.push(of("SMART, both", both));
        curves
    },
    headlines: &[
        experiment("SMART / ART, as many nodes", "A", At::Place(0), [0, 1], 3.4),
        experiment("SMART / ART, as many nodes", "C", At::Place(1), [0, 1], 1.2),
        experiment("SMART / Sherman, as many nodes", "A", At::Place(0), [0, 2], 6.1),
        experiment("SMART / Sherman, as many nodes", "C", At::Place(1), [0, 2], 2.8),
    ],
    ..DEFAULTS
};
