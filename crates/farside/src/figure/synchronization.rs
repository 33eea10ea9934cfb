//! Figures of Ziegler et al., *Design Guidelines for Correct, Efficient, and Scalable Synchronization using One-Sided
//! RDMA* (SIGMOD 2023).

use super::{At, Claim, Curve, Figure, Headline, OnFabrics, Predict, Published, Shape, Value};
use farside_bench::workload::Lengths;
use farside_predict::{Load, Search, Tree, Variant};
use farside_sim::hardware::{INPUTS, Platform, Testbed};
use farside_sim::micro::{SECTION_4 as NUMBERS, Workers, mverbs};
use farside_systems::latch::btree::{entries_in, node_len};
use farside_systems::latch::{self, Latching, Placement, Scheme};

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
    rivals: None,
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

/// Numbers of workers of the figures, spread over four machines.
const WORKERS: [u32; 6] = [1, 8, 32, 128, 512, 2_048];
/// Indexes of places with these numbers of workers.
const ALONE: At = At::Place(0);
const MANY: At = At::Place(5);
const FEW: At = At::Place(1);
const AT_128: At = At::Place(3);
const WORKERS_AND_RATE: [&str; 2] = ["workers", "million operations a second"];

fn workers() -> Vec<&'static str> {
    vec!["1", "8", "32", "128", "512", "2048"]
}

const UNPUBLISHED: &str = "the published curve is not available";

/// A curve of CAS over the number of workers, whose words are `stride` bytes apart, with its published points.
fn scaling(name: &'static str, stride: u64, published: &[(usize, f64)]) -> Curve {
    let judged = Shape::Within(0.25);
    let at = |&(place, value)| Published { at: At::Place(place), value, judged };
    Curve {
        name,
        predict: Predict::Each(Box::new(move |place| Some(apart(WORKERS[place], stride)))),
        published: published.iter().map(at).collect(),
        unpublished: UNPUBLISHED,
    }
}

/// Scalability of CAS: one word, and words apart. The published points are those of the text.
pub(super) static ATOMICS: Figure = Figure {
    name: "synchronization-atomics",
    title: "Synchronization: CAS over workers",
    source: "Ziegler et al., SIGMOD 2023, section 4",
    axes: ["workers", "million CAS a second"],
    places: workers,
    unit: "M/s",
    curves: || {
        vec![
            scaling("one word", 0, &[(1, 2.32), (3, 2.32)]),
            scaling("64 bytes apart", 64, &[(3, 51.2)]),
            scaling("256 bytes apart", 256, &[(3, 40.0)]),
            scaling("512 bytes apart", 512, &[(3, 25.6)]),
        ]
    },
    headlines: &[],
    claims: &[Claim {
        what: "512 workers are slower than 128, since the clients' NICs do not cache their connections",
        ratios: &[(
            Value::On("64 bytes apart", At::Place(4)),
            Value::On("64 bytes apart", At::Place(3)),
            Shape::Below(1.0),
        )],
    }],
    rivals: None,
    fabrics: OnFabrics::Nothing("the atomics of a NIC"),
};

/// Sizes of objects, each with a latch.
const SIZES: [u64; 7] = [64, 128, 256, 512, 1_024, 2_048, 4_096];

/// A curve of CAS on the latches of 128 objects over their size.
fn placed(name: &'static str, stride: fn(u64) -> u64, published: &[(usize, f64)]) -> Curve {
    let judged = Shape::Within(0.25);
    let at = |&(place, value)| Published { at: At::Place(place), value, judged };
    Curve {
        name,
        predict: Predict::Each(Box::new(move |place| Some(apart(128, stride(SIZES[place]))))),
        published: published.iter().map(at).collect(),
        unpublished: "not in the paper",
    }
}

/// CAS by 128 workers on latches of their own, which lie within the objects or apart.
pub(super) static PADDING: Figure = Figure {
    name: "synchronization-padding",
    title: "Synchronization: CAS by 128 workers on the latches of objects",
    source: "Ziegler et al., SIGMOD 2023, section 4 and figure 3",
    axes: ["bytes of an object", "million CAS a second"],
    places: || vec!["64", "128", "256", "512", "1024", "2048", "4096"],
    unit: "M/s",
    curves: || {
        vec![
            placed("in the object", |size| size, &[(0, 51.2), (2, 40.0), (3, 25.6)]),
            placed("with 8 bytes of padding", |size| size + 8, &[(6, 51.2)]),
            placed("latches apart", |_| 8, &[]),
        ]
    },
    headlines: &[],
    claims: &[Claim {
        what: "8 bytes of padding on 4 KiB raise the throughput at least ten times, and so do latches apart",
        ratios: &[
            (
                Value::On("with 8 bytes of padding", At::Place(6)),
                Value::On("in the object", At::Place(6)),
                Shape::AtLeast(10.0),
            ),
            (
                Value::On("latches apart", At::Place(6)),
                Value::On("in the object", At::Place(6)),
                Shape::AtLeast(10.0),
            ),
        ],
    }],
    rivals: None,
    fabrics: OnFabrics::Nothing("the atomics of a NIC"),
};

/// The latch benchmark: 200,000 objects of 256 bytes with 8 bytes of padding.
const fn latched(scheme: Scheme, reads: f64) -> Load {
    let latching = Latching { scheme: Some(scheme), placement: Placement::Padded };
    Load {
        system: latch::KIND,
        variant: Variant { latching, ..Variant::OURS },
        platform: Platform::Rdma,
        testbed: Testbed::SYNCHRONIZATION,
        inputs: INPUTS,
        reads,
        keys: 1,
        value_len: 256,
        lengths: Lengths::Constant,
        skew: 0.0,
        records: Some(200_000),
        cached: 0,
    }
}

/// A scheme under a share of reads, and the name of its curve.
type Contender = (&'static str, &'static str, f64);

/// Pessimistic schemes, each of which keeps the steps before it. In the exclusive mode all operations write, in the
/// shared mode all read. The last one has no shared mode.
const ABLATION: [Contender; 9] = [
    ("basic, exclusive", "basic", 0.0),
    ("speculative, exclusive", "speculative", 0.0),
    ("overlapped, exclusive", "overlapped", 0.0),
    ("async, exclusive", "async", 0.0),
    ("unlatch, exclusive", "unlatch", 0.0),
    ("basic, shared", "basic-rw", 1.0),
    ("speculative, shared", "speculative-rw", 1.0),
    ("overlapped, shared", "overlapped-rw", 1.0),
    ("async, shared", "async-rw", 1.0),
];

/// Reads by the simplest and the fastest reader/writer latch, and without a latch.
const READERS: [Contender; 5] = [
    ("basic-rw", "basic-rw", 1.0),
    ("async-rw", "async-rw", 1.0),
    ("v2", "v2", 1.0),
    ("crc", "crc", 1.0),
    ("versions", "versions", 1.0),
];

fn load_of(scheme: &str, reads: f64) -> Box<Load> {
    Box::new(latched(Scheme::named(scheme).expect("a scheme of this name"), reads))
}

/// Curves of schemes over the number of workers.
fn by_workers(contenders: &[Contender]) -> Vec<Curve> {
    let curve = |&(name, scheme, reads): &Contender| Curve {
        name,
        predict: Predict::ByClients { load: load_of(scheme, reads), clients: &WORKERS },
        published: Vec::new(),
        unpublished: UNPUBLISHED,
    };
    contenders.iter().map(curve).collect()
}

/// Throughput of one worker by a scheme, relative to another: the inverse ratio of the round trips that an operation
/// awaits.
const fn by_round_trips(
    curves: &'static str,
    [of, to]: [&'static str; 2],
    ratio: f64,
    judged: Shape,
) -> Headline {
    let point = "1 worker, by round trips";
    Headline {
        curves,
        point,
        of: Value::On(of, ALONE),
        to: Value::On(to, ALONE),
        published: Some(ratio),
        judged,
    }
}

const WITHIN: Shape = Shape::Within(0.15);
/// Round trips take equally long in the paper's count, and not on its machines.
const UNEQUAL: Shape = Shape::Reported("a CAS and a READ behind it take 3.1 us, a WRITE 1.9 us");

/// Ablation of the pessimistic schemes.
pub(super) static LATCHES: Figure = Figure {
    name: "synchronization-latches",
    title: "Synchronization: latches, 200,000 objects of 256 bytes, uniform",
    source: "Ziegler et al., SIGMOD 2023, latch benchmark",
    axes: WORKERS_AND_RATE,
    places: workers,
    unit: "M/s",
    curves: || by_workers(&ABLATION),
    headlines: &[
        by_round_trips(
            "speculative / basic, exclusive",
            ["speculative, exclusive", "basic, exclusive"],
            1.33,
            WITHIN,
        ),
        by_round_trips(
            "overlapped / basic, exclusive",
            ["overlapped, exclusive", "basic, exclusive"],
            2.0,
            UNEQUAL,
        ),
        by_round_trips("async / basic, exclusive", ["async, exclusive", "basic, exclusive"], 4.0, UNEQUAL),
        by_round_trips(
            "unlatch / basic, exclusive",
            ["unlatch, exclusive", "basic, exclusive"],
            4.0,
            UNEQUAL,
        ),
        by_round_trips("speculative / basic, shared", ["speculative, shared", "basic, shared"], 1.5, WITHIN),
        by_round_trips("overlapped / basic, shared", ["overlapped, shared", "basic, shared"], 1.5, WITHIN),
        by_round_trips("async / basic, shared", ["async, shared", "basic, shared"], 3.0, UNEQUAL),
    ],
    claims: &[],
    rivals: None,
    fabrics: OnFabrics::Nothing("the atomics of a NIC"),
};

/// Optimistic reads beside pessimistic ones, over the number of workers.
pub(super) static OPTIMISTIC: Figure = Figure {
    name: "synchronization-optimistic",
    title: "Synchronization: reads, 200,000 objects of 256 bytes, uniform",
    source: "Ziegler et al., SIGMOD 2023, optimistic benchmark",
    axes: WORKERS_AND_RATE,
    places: workers,
    unit: "M/s",
    curves: || by_workers(&READERS),
    headlines: &[
        Headline {
            curves: "versions / basic-rw",
            point: "2048 workers",
            of: Value::On("versions", MANY),
            to: Value::On("basic-rw", MANY),
            // The paper's text: about twice as fast at high concurrency.
            published: Some(2.0),
            judged: Shape::Reported("a NIC at its limit executes 2 verbs instead of 3; see the skew"),
        },
        by_round_trips("versions / v2", ["versions", "v2"], 1.5, WITHIN),
        by_round_trips("crc / v2", ["crc", "v2"], 1.5, Shape::Reported("the CRC takes 0.9 us")),
        by_round_trips("v2 / basic-rw", ["v2", "basic-rw"], 1.0, WITHIN),
        by_round_trips("versions / async-rw", ["versions", "async-rw"], 0.5, UNEQUAL),
    ],
    claims: &[
        Claim {
            what: "up to 32 workers, the fastest latch is faster than any optimistic read, and at 128 it is not",
            ratios: &[
                (Value::On("async-rw", At::Place(2)), Value::On("versions", At::Place(2)), Shape::Above(1.0)),
                (Value::On("async-rw", At::Place(3)), Value::On("versions", At::Place(3)), Shape::Below(1.0)),
            ],
        },
        Claim {
            what: "at any number of workers, versions are faster than the simplest latch and than v2",
            ratios: &[
                (Value::On("versions", ALONE), Value::On("basic-rw", ALONE), Shape::Above(1.0)),
                (Value::On("versions", At::Place(3)), Value::On("basic-rw", At::Place(3)), Shape::Above(1.0)),
                (Value::On("versions", MANY), Value::On("basic-rw", MANY), Shape::Above(1.0)),
                (Value::On("versions", MANY), Value::On("v2", MANY), Shape::Above(1.0)),
            ],
        },
    ],
    rivals: None,
    fabrics: OnFabrics::Nothing("the atomics of a NIC"),
};

/// Zipf coefficients of the paper's benchmark.
const COEFFICIENTS: [f64; 5] = [0.0, 1.0, 1.5, 2.0, 2.5];

/// Latency of reads over the skew of the objects.
pub(super) static ZIPF: Figure = Figure {
    name: "synchronization-zipf",
    title: "Synchronization: reads by 128 workers, 200,000 objects of 256 bytes",
    source: "Ziegler et al., SIGMOD 2023, optimistic benchmark",
    axes: ["Zipf coefficient", "mean latency, us"],
    places: || vec!["0", "1.0", "1.5", "2.0", "2.5"],
    unit: "us",
    curves: || {
        let curve = |&(name, scheme, reads): &Contender| Curve {
            name,
            predict: Predict::UnderSkew {
                load: load_of(scheme, reads),
                clients: 128,
                coefficients: &COEFFICIENTS,
            },
            published: Vec::new(),
            unpublished: UNPUBLISHED,
        };
        READERS.iter().map(curve).collect()
    },
    headlines: &[],
    claims: &[Claim {
        what: "skew multiplies the latency of latched reads by more than 3, and leaves that of optimistic reads",
        ratios: &[
            (Value::On("async-rw", At::Place(4)), Value::On("async-rw", At::Place(0)), Shape::Above(3.0)),
            (Value::On("versions", At::Place(4)), Value::On("versions", At::Place(0)), Shape::Below(1.25)),
        ],
    }],
    rivals: None,
    fabrics: OnFabrics::Nothing("the atomics of a NIC"),
};

/// Lengths of objects, in bytes. The paper's benchmark goes to 64 KiB, and objects here to 32 KiB.
const READ_SIZES: [usize; 6] = [64, 256, 1024, 4096, 16384, 32768];

/// Latency of reads over the size of the objects.
pub(super) static SIZE: Figure = Figure {
    name: "synchronization-sizes",
    title: "Synchronization: reads by one worker, 8 bytes of padding",
    source: "Ziegler et al., SIGMOD 2023, optimistic benchmark",
    axes: ["size of an object", "mean latency, us"],
    places: || vec!["64 B", "256 B", "1 KiB", "4 KiB", "16 KiB", "32 KiB"],
    unit: "us",
    curves: || {
        let curve = |&(name, scheme, reads): &Contender| {
            let mut load = load_of(scheme, reads);
            load.records = Some(10_000);
            Curve {
                name,
                predict: Predict::ByLength {
                    load,
                    clients: 1,
                    lengths: &READ_SIZES,
                    value: |measured| measured.mean_us,
                },
                published: Vec::new(),
                unpublished: UNPUBLISHED,
            }
        };
        READERS.iter().map(curve).collect()
    },
    headlines: &[],
    claims: &[
        Claim {
            what: "at any size, a latch whose release is not awaited is faster than any optimistic read",
            ratios: &[
                (Value::On("async-rw", At::Place(0)), Value::On("versions", At::Place(0)), Shape::Below(1.0)),
                (Value::On("async-rw", At::Place(5)), Value::On("versions", At::Place(5)), Shape::Below(1.0)),
            ],
        },
        Claim {
            what: "a CRC costs more than a further READ from 1 KiB on, and versions never do",
            ratios: &[
                (Value::On("crc", At::Place(1)), Value::On("v2", At::Place(1)), Shape::Below(1.0)),
                (Value::On("crc", At::Place(2)), Value::On("v2", At::Place(2)), Shape::Above(1.0)),
                (Value::On("crc", At::Place(5)), Value::On("v2", At::Place(5)), Shape::Above(5.0)),
                (Value::On("versions", At::Place(5)), Value::On("v2", At::Place(5)), Shape::Below(1.0)),
            ],
        },
    ],
    rivals: None,
    fabrics: OnFabrics::Nothing("the atomics of a NIC"),
};

/// Fanout of the nodes of the study's B-tree test.
const FANOUT: usize = 249;
/// Keys of a tree of three levels with this fanout, whose root has 16 children. The study's root has 249.
const TREE_KEYS: u64 = 16 * (FANOUT * FANOUT) as u64;

/// A scheme, how lookups read nodes, a share of lookups, and the name of the curve.
type Searched = (&'static str, &'static str, Search, f64);

/// The study's three ways to look a key up, and two of them with updates. Without synchronization, no key may be
/// updated.
const TREES: [Searched; 7] = [
    ("none", "basic-rw", Search::Unsynchronized, 1.0),
    ("basic-rw", "basic-rw", Search::Synchronized, 1.0),
    ("versions-footer", "versions-footer", Search::Synchronized, 1.0),
    ("basic-rw, 5 % updates", "basic-rw", Search::Synchronized, 0.95),
    ("versions-footer, 5 % updates", "versions-footer", Search::Synchronized, 0.95),
    ("basic-rw, 50 % updates", "basic-rw", Search::Synchronized, 0.5),
    ("versions-footer, 50 % updates", "versions-footer", Search::Synchronized, 0.5),
];

/// A tree of nodes of 4 KiB with their latches and versions, and with 8 bytes of padding. Versions leave space for
/// fewer entries than the study's fanout.
fn tree(scheme: &str, search: Search, lookups: f64) -> Box<Load> {
    const NODE: u32 = 4_096;
    let mut load = load_of(scheme, lookups);
    let known = Scheme::named(scheme).expect("a scheme of this name");
    let len = node_len(known, NODE).expect("a node is longer than a latch");
    load.variant.tree = Some(Tree { fill: FANOUT.min(entries_in(len)), search });
    (load.value_len, load.records) = (len as usize, Some(TREE_KEYS));
    load
}

/// Lookups in a B-tree over the number of workers.
pub(super) static BTREE: Figure = Figure {
    name: "synchronization-btree",
    title: "Synchronization: a B-tree of three levels, nodes of 4 KiB, uniform",
    source: "Ziegler et al., SIGMOD 2023, B-tree test",
    axes: WORKERS_AND_RATE,
    places: workers,
    unit: "M/s",
    curves: || {
        let curve = |&(name, scheme, search, lookups): &Searched| Curve {
            name,
            predict: Predict::ByClients { load: tree(scheme, search, lookups), clients: &WORKERS },
            published: Vec::new(),
            unpublished: UNPUBLISHED,
        };
        TREES.iter().map(curve).collect()
    },
    headlines: &[
        by_round_trips("versions-footer / basic-rw", ["versions-footer", "basic-rw"], 1.5, WITHIN),
        by_round_trips(
            "none / versions-footer",
            ["none", "versions-footer"],
            2.0,
            Shape::Reported("a READ of 4 KiB takes longer than the READ that validates it"),
        ),
    ],
    claims: &[
        Claim {
            what: "up to 8 workers, no synchronization is faster than versions, and versions than the latch",
            ratios: &[
                (Value::On("none", ALONE), Value::On("versions-footer", ALONE), Shape::Above(1.2)),
                (Value::On("versions-footer", ALONE), Value::On("basic-rw", ALONE), Shape::Above(1.2)),
                (Value::On("none", FEW), Value::On("versions-footer", FEW), Shape::Above(1.2)),
                (Value::On("versions-footer", FEW), Value::On("basic-rw", FEW), Shape::Above(1.2)),
            ],
        },
        Claim {
            what: "at 128 workers, the link limits all lookups, which are equally fast within a quarter",
            ratios: &[
                (Value::On("versions-footer", AT_128), Value::On("none", AT_128), Shape::Within(0.25)),
                (Value::On("basic-rw", AT_128), Value::On("none", AT_128), Shape::Within(0.25)),
            ],
        },
        Claim {
            what: "also with updates, versions are faster than the latch at 1 and 8 workers, and not slower at 128",
            ratios: &[
                (
                    Value::On("versions-footer, 5 % updates", ALONE),
                    Value::On("basic-rw, 5 % updates", ALONE),
                    Shape::Above(1.1),
                ),
                (
                    Value::On("versions-footer, 5 % updates", FEW),
                    Value::On("basic-rw, 5 % updates", FEW),
                    Shape::Above(1.1),
                ),
                (
                    Value::On("versions-footer, 50 % updates", ALONE),
                    Value::On("basic-rw, 50 % updates", ALONE),
                    Shape::Above(1.1),
                ),
                (
                    Value::On("versions-footer, 50 % updates", FEW),
                    Value::On("basic-rw, 50 % updates", FEW),
                    Shape::Above(1.1),
                ),
                (
                    Value::On("versions-footer, 50 % updates", AT_128),
                    Value::On("basic-rw, 50 % updates", AT_128),
                    Shape::AtLeast(0.95),
                ),
            ],
        },
    ],
    rivals: None,
    fabrics: OnFabrics::Nothing("the atomics of a NIC"),
};
