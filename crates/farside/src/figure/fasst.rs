//! Figures of the case for calls in Kalia et al., *FaSST: Fast, Scalable and Simple Distributed Transactions with
//! Two-Sided (RDMA) Datagram RPCs* (OSDI 2016): calls beside READs, connections in the NIC's cache, shared queue pairs,
//! doorbells.
//!
//! The curves of the paper are not available, only some numbers of its text and of the notes in its public code. Rates
//! are those of a machine, while all machines issue and serve requests. The load is [`Load::paper`].

use super::{At, Claim, Curve, Figure, Headline, OnFabrics, Point, Predict, Published, Shape, Value};
use farside_predict::calls::{Bed, Headers, Load, Measured, Requests};
use farside_sim::fabric::hardware::peers::Doorbells;
use farside_sim::hardware::{CIB, CX3, Cluster};

const UNPUBLISHED: &str = "the published curve is not available";
const CALLS: Requests = Requests::Calls(Headers::Paper);
const MILLION: f64 = 1e6;

/// Number of machines of the paper's experiments on CIB, which are all.
const MACHINES: u32 = 11;
/// Number of machines of a small cluster, whose connections the NIC of CX3 caches.
const FEW_MACHINES: u32 = 6;

fn measure(load: Load, operations: u64) -> Result<Measured, String> {
    Bed::new(load, 1)?.measure(operations)
}

/// A curve with a point for each of these loads.
fn curve(
    name: &'static str,
    loads: Vec<Load>,
    value: fn(&Measured) -> f64,
    published: Vec<Published>,
) -> Curve {
    let points = move |operations| {
        let point = |(place, &load): (usize, &Load)| {
            Ok(Point { x: place as f64, y: value(&measure(load, operations)?) })
        };
        loads.iter().enumerate().map(point).collect()
    };
    Curve { name, predict: Predict::Points(Box::new(points)), published, unpublished: UNPUBLISHED }
}

fn mops(measured: &Measured) -> f64 {
    measured.ops_per_s / MILLION
}

fn at(place: usize, value: f64, judged: Shape) -> Vec<Published> {
    vec![Published { at: At::Place(place), value, judged }]
}

/// Lengths of what a request returns, in bytes.
const LENS: [u32; 6] = [32, 64, 128, 256, 512, 1024];
/// Place of the length of the paper's requests.
const SHORT: usize = 0;
const WITHIN: Shape = Shape::Within(0.1);

/// One call beside one READ and several.
pub(super) static RPC_READ: Figure = Figure {
    name: "fasst-rpc-read",
    title: "FaSST: one call beside READs one after the other, all machines",
    source: "Kalia et al., OSDI 2016; notes on DCT in the public code",
    axes: ["bytes returned", "million operations a second and machine"],
    places: || vec!["32 B", "64 B", "128 B", "256 B", "512 B", "1 KiB"],
    unit: "M/s",
    curves: || {
        let of = |name, cluster: Cluster, machines, requests, published| {
            let load = |len| Load { len, ..Load::paper(cluster, machines, requests) };
            curve(name, LENS.map(load).to_vec(), mops, published)
        };
        vec![
            of("CIB, call", CIB, MACHINES, CALLS, at(SHORT, 40.9, WITHIN)),
            of("CIB, call with own headers", CIB, MACHINES, Requests::Calls(Headers::Own), Vec::new()),
            of("CIB, 1 READ", CIB, MACHINES, Requests::Reads(1), at(SHORT, 50.0, WITHIN)),
            of("CIB, 2 READs", CIB, MACHINES, Requests::Reads(2), Vec::new()),
            of("CIB, 3 READs", CIB, MACHINES, Requests::Reads(3), Vec::new()),
            of("CX3, call", CX3, FEW_MACHINES, CALLS, Vec::new()),
            of("CX3, call with own headers", CX3, FEW_MACHINES, Requests::Calls(Headers::Own), Vec::new()),
            of("CX3, 1 READ", CX3, FEW_MACHINES, Requests::Reads(1), Vec::new()),
            of("CX3, 2 READs", CX3, FEW_MACHINES, Requests::Reads(2), Vec::new()),
            of("CX3, 3 READs", CX3, FEW_MACHINES, Requests::Reads(3), Vec::new()),
        ]
    },
    headlines: &[],
    claims: &[
        Claim { what: "on CIB, a call is faster than two READs, at every size", ratios: &FASTER_ON_CIB },
        Claim { what: "on CX3, a call is faster than two READs, at every size", ratios: &FASTER_ON_CX3 },
        Claim {
            what: "in a small cluster of CX3, a call and a READ are about equally fast",
            ratios: &[(
                Value::On("CX3, call", At::Place(SHORT)),
                Value::On("CX3, 1 READ", At::Place(SHORT)),
                Shape::Within(0.25),
            )],
        },
    ],
    rivals: None,
    fabrics: OnFabrics::Nothing("what limits a NIC"),
};

const FASTER_ON_CIB: [(Value, Value, Shape); LENS.len()] = faster("CIB, call", "CIB, 2 READs");
const FASTER_ON_CX3: [(Value, Value, Shape); LENS.len()] = faster("CX3, call", "CX3, 2 READs");

/// One curve is above the other at all places.
const fn faster<const N: usize>(one: &'static str, other: &'static str) -> [(Value, Value, Shape); N] {
    let mut all = [(Value::On(one, At::Place(0)), Value::On(other, At::Place(0)), Shape::Above(1.0)); N];
    let mut place = 1;
    while place < N {
        all[place] =
            (Value::On(one, At::Place(place)), Value::On(other, At::Place(place)), Shape::Above(1.0));
        place += 1;
    }
    all
}

/// Numbers of machines that each thread is connected to, with itself. Those of 21 and more have 11 machines with more
/// connections.
const CLUSTERS: [u32; 6] = [6, 11, 21, 41, 81, 161];
/// Places of these numbers of machines.
const AT_6: At = At::Place(0);
const AT_11: At = At::Place(1);
const AT_21: At = At::Place(2);
const AT_81: At = At::Place(4);
const AT_161: At = At::Place(5);

/// READs in clusters of different sizes. The larger ones are emulated by more connections, as the paper does.
fn reads_by_machines(cluster: Cluster) -> Vec<Load> {
    let load = |machines: u32| match (machines - 1) / (MACHINES - 1) {
        0 => Load::paper(cluster, machines, Requests::Reads(1)),
        connections => Load { connections, ..Load::paper(cluster, MACHINES, Requests::Reads(1)) },
    };
    CLUSTERS.map(load).to_vec()
}

/// Calls in clusters of different sizes, which have as many machines.
fn calls_by_machines(cluster: Cluster) -> Vec<Load> {
    CLUSTERS[..3].iter().map(|&machines| Load::paper(cluster, machines, CALLS)).collect()
}

/// READs and calls over the number of connections.
pub(super) static QPS: Figure = Figure {
    name: "fasst-qps",
    title: "FaSST: READs and calls of 32 bytes, over the number of machines",
    source: "Kalia et al., OSDI 2016; notes on DCT in the public code",
    axes: ["machines", "million operations a second and machine"],
    places: || vec!["6", "11", "21", "41", "81", "161"],
    unit: "M/s",
    curves: || {
        vec![
            curve("CIB, READs", reads_by_machines(CIB), mops, at(1, 50.0, WITHIN)),
            curve("CIB, calls", calls_by_machines(CIB), mops, at(1, 40.9, WITHIN)),
            curve("CX3, READs", reads_by_machines(CX3), mops, Vec::new()),
            curve("CX3, calls", calls_by_machines(CX3), mops, Vec::new()),
        ]
    },
    headlines: &[],
    claims: &[
        Claim {
            what: "on CX3, twice as many connections lower the rate of READs by more than 10 %",
            ratios: &[(Value::On("CX3, READs", AT_21), Value::On("CX3, READs", AT_11), Shape::Below(0.9))],
        },
        Claim {
            what: "on CIB, twice as many do not, and 16 times as many do",
            ratios: &[
                (Value::On("CIB, READs", AT_21), Value::On("CIB, READs", AT_11), Shape::Above(0.95)),
                (Value::On("CIB, READs", AT_161), Value::On("CIB, READs", AT_11), Shape::Below(0.9)),
                (Value::On("CIB, READs", AT_161), Value::On("CIB, READs", AT_81), Shape::Below(1.0)),
            ],
        },
        Claim {
            what: "the rate of calls stays within 5 %",
            ratios: &[
                (Value::On("CIB, calls", AT_6), Value::On("CIB, calls", AT_11), Shape::Within(0.05)),
                (Value::On("CIB, calls", AT_21), Value::On("CIB, calls", AT_11), Shape::Within(0.05)),
                (Value::On("CX3, calls", AT_6), Value::On("CX3, calls", AT_11), Shape::Within(0.05)),
                (Value::On("CX3, calls", AT_21), Value::On("CX3, calls", AT_11), Shape::Within(0.05)),
            ],
        },
    ],
    rivals: None,
    fabrics: OnFabrics::Nothing("the caches of a NIC"),
};

/// Numbers of threads that share each connection.
const SHARERS: [u32; 5] = [1, 2, 4, 7, 14];

/// READs of one machine, whose threads share all connections. The others only serve them.
fn shared(sharers: u32) -> Load {
    let load = Load::paper(CIB, MACHINES, Requests::Reads(1));
    Load { issuing: 1, threads: sharers, sharers, tasks: 32, ..load }
}

/// Rate of a thread with private and with shared queue pairs.
pub(super) static SHARING: Figure = Figure {
    name: "fasst-sharing",
    title: "FaSST: READs of 32 bytes by a thread of CIB, which shares its queue pairs",
    source: "Kalia et al., OSDI 2016; notes on DCT in the public code",
    axes: ["threads that share each queue pair", "million READs a second and thread"],
    places: || vec!["1", "2", "4", "7", "14"],
    unit: "M/s",
    curves: || {
        let of_thread = |place, operations| {
            let sharers: u32 = SHARERS[place];
            Ok(mops(&measure(shared(sharers), operations)?) / f64::from(sharers))
        };
        vec![Curve {
            name: "READs",
            predict: Predict::Found(Box::new(of_thread)),
            published: at(0, 10.9, WITHIN),
            unpublished: UNPUBLISHED,
        }]
    },
    headlines: &[
        Headline {
            curves: "private / shared",
            point: "2 threads",
            of: Value::On("READs", At::Place(0)),
            to: Value::On("READs", At::Place(1)),
            published: Some(5.4),
            judged: SHARED,
        },
        Headline {
            curves: "private / shared",
            point: "14 threads",
            of: Value::On("READs", At::Place(0)),
            to: Value::On("READs", At::Place(4)),
            published: Some(5.4),
            judged: SHARED,
        },
    ],
    claims: &[Claim {
        what: "a shared queue pair makes a thread slower, and more sharers do so more",
        ratios: &[
            (Value::On("READs", At::Place(1)), Value::On("READs", At::Place(0)), Shape::Below(0.5)),
            (Value::On("READs", At::Place(4)), Value::On("READs", At::Place(1)), Shape::Below(1.0)),
        ],
    }],
    rivals: None,
    fabrics: OnFabrics::Nothing("the queue pairs of a NIC"),
};

const SHARED: Shape = Shape::Reported("the paper says up to 5.4, and not for how many threads");

/// Numbers of requests of a batch, each to another machine.
const BATCHES: [u32; 4] = [1, 2, 4, 8];

/// Requests by one thread of each machine of CIB.
fn batches(requests: Requests, doorbells: Doorbells) -> Vec<Load> {
    let load = Load::paper(CIB, MACHINES, requests);
    BATCHES.map(|batch| Load { threads: 1, batch, doorbells, ..load }).to_vec()
}

const LISTED: &str = "calls, a doorbell for each batch";
const SINGLE: &str = "calls, a doorbell for each call";
const CONNECTED: &str = "READs on connections";

fn by_batch(value: fn(&Measured) -> f64) -> Vec<Curve> {
    vec![
        curve(LISTED, batches(CALLS, Doorbells::ForList), value, Vec::new()),
        curve(SINGLE, batches(CALLS, Doorbells::ForEach), value, Vec::new()),
        curve(CONNECTED, batches(Requests::Reads(1), Doorbells::ForList), value, Vec::new()),
    ]
}

/// Number of doorbells of a batch.
pub(super) static DOORBELL: Figure = Figure {
    name: "fasst-doorbell",
    title: "FaSST: doorbells for a batch, each of whose requests goes to another machine",
    source: "Kalia et al., OSDI 2016, doorbell batching",
    axes: ["requests of a batch", "doorbells for the requests"],
    places: || vec!["1", "2", "4", "8"],
    unit: "doorbells",
    curves: || by_batch(|measured| measured.doorbells),
    headlines: &[],
    claims: &[
        Claim {
            what: "a batch of calls takes one doorbell",
            ratios: &[
                (Value::On(LISTED, At::Place(0)), Value::Of(|| 1.0), Shape::Within(0.01)),
                (Value::On(LISTED, At::Place(3)), Value::Of(|| 1.0), Shape::Within(0.01)),
            ],
        },
        Claim {
            what: "on connections, a batch takes one for each machine",
            ratios: &[
                (Value::On(CONNECTED, At::Place(1)), Value::Of(|| 2.0), Shape::Within(0.01)),
                (Value::On(CONNECTED, At::Place(3)), Value::Of(|| 8.0), Shape::Within(0.01)),
                (Value::On(SINGLE, At::Place(3)), Value::Of(|| 8.0), Shape::Within(0.01)),
            ],
        },
    ],
    rivals: None,
    fabrics: OnFabrics::Nothing("the doorbells of a NIC"),
};

/// Rate of a core with fewer doorbells and more.
pub(super) static DOORBELL_RATE: Figure = Figure {
    name: "fasst-doorbell-rate",
    title: "FaSST: requests of 32 bytes by one thread of each machine of CIB",
    source: "Kalia et al., OSDI 2016, doorbell batching",
    axes: ["requests of a batch", "million requests a second and thread"],
    places: || vec!["1", "2", "4", "8"],
    unit: "M/s",
    curves: || by_batch(mops),
    headlines: &[],
    claims: &[Claim {
        what: "with 8 calls in a batch, one doorbell for all makes a core faster",
        ratios: &[(Value::On(LISTED, At::Place(3)), Value::On(SINGLE, At::Place(3)), Shape::Above(1.1))],
    }],
    rivals: None,
    fabrics: OnFabrics::Nothing("the doorbells of a NIC"),
};
