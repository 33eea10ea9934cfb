//! Figures of the transactions in Kalia et al., *FaSST: Fast, Scalable and Simple Distributed Transactions with
//! Two-Sided (RDMA) Datagram RPCs* (OSDI 2016): TATP, SmallBank, and their rate over the number of machines.
//!
//! The curves of the paper are not available, and its numbers here are from memory of the paper or derived from them.
//! So no prediction is judged by them. Rates are those of a machine, while all machines run transactions and serve
//! them. The load is [`Load::paper`], with fewer rows.

use super::{
    At, Claim, Curve, Figure, Headline, OnFabrics, Point, Predict, Published, Shape, Value, together,
};
use farside_bench::oltp::smallbank::SmallBank;
use farside_bench::oltp::tatp::Tatp;
use farside_predict::oltp::{Bed, Load, Measured};
use farside_sim::hardware::{CIB, CX3, Cluster};

const UNPUBLISHED: &str = "the published curve is not available";
const RECALLED: Shape = Shape::Reported("the published number is from memory of the paper");
const MILLION: f64 = 1e6;

/// Number of machines in the model of a cluster, except in the figure over this number.
const MACHINES: u32 = 6;
/// Number of TATP's subscribers for each machine. Transactions draw among 1 million of them, as in the paper, and each
/// of the model's stands for 200.
const SUBSCRIBERS: u64 = 5_000;
/// Number of SmallBank's accounts for each thread. The paper has 100,000.
const ACCOUNTS: u64 = 12_500;
/// Places of the clusters.
const AT_CX3: At = At::Place(0);
const AT_CIB: At = At::Place(1);
const CLUSTERS: [Cluster; 2] = [CX3, CIB];

fn tatp(load: Load, operations: u64) -> Result<Measured, String> {
    let machines = u64::from(load.machines);
    let tatp = Tatp::folded(SUBSCRIBERS * machines, Tatp::SUBSCRIBERS * machines)?;
    Bed::new(load, tatp, 1)?.measure(operations)
}

fn smallbank(load: Load, operations: u64) -> Result<Measured, String> {
    let threads = u64::from(load.machines * load.threads);
    Bed::new(load, SmallBank::new(ACCOUNTS * threads)?, 1)?.measure(operations)
}

type Measure = fn(Load, u64) -> Result<Measured, String>;

const SUCCESSFUL: &str = "FaSST, transactions that succeed";
const ALL: &str = "FaSST, all transactions";

fn curve(name: &'static str, predict: Predict, published: Vec<Published>) -> Curve {
    Curve { name, predict, published, unpublished: UNPUBLISHED }
}

/// The rates of the transactions that succeed and of all, on both clusters.
fn on_clusters(measure: Measure, published: Published) -> Vec<Curve> {
    let [successful, all] = together(move |operations| {
        let mut curves = [const { Vec::new() }; 2];
        for (place, cluster) in CLUSTERS.into_iter().enumerate() {
            let Measured { successes_per_s, ops_per_s, .. } =
                measure(Load::paper(cluster, MACHINES), operations)?;
            for (curve, rate) in curves.iter_mut().zip([successes_per_s, ops_per_s]) {
                curve.push(Point { x: place as f64, y: rate / MILLION });
            }
        }
        Ok(curves)
    });
    vec![curve(SUCCESSFUL, successful, vec![published]), curve(ALL, all, Vec::new())]
}

/// TATP beside FaRM.
pub(super) static TATP: Figure = Figure {
    name: "fasst-tatp",
    title: "FaSST: TATP on 6 machines, 3 copies",
    source: "Kalia et al., OSDI 2016",
    axes: ["cluster", "million transactions a second and machine"],
    places: || vec!["CX3", "CIB"],
    unit: "M/s",
    curves: || on_clusters(tatp, Published { at: AT_CX3, value: 2.9, judged: RECALLED }),
    headlines: &[Headline {
        curves: "FaSST / FaRM (1.55 published)",
        point: "CX3",
        of: Value::On(SUCCESSFUL, AT_CX3),
        to: Value::Of(|| 1.55),
        published: Some(1.87),
        judged: RECALLED,
    }],
    claims: &[Claim {
        what: "FaSST is faster than FaRM's published rate on both clusters",
        ratios: &[
            (Value::On(SUCCESSFUL, AT_CX3), Value::Of(|| 1.55), Shape::Above(1.0)),
            (Value::On(SUCCESSFUL, AT_CIB), Value::Of(|| 1.55), Shape::Above(1.0)),
        ],
    }],
    rivals: None,
    fabrics: OnFabrics::Nothing("machines that are nodes and clients"),
};

/// SmallBank beside DrTM+R.
pub(super) static SMALLBANK: Figure = Figure {
    name: "fasst-smallbank",
    title: "FaSST: SmallBank on 6 machines, 3 copies",
    source: "Kalia et al., OSDI 2016",
    axes: ["cluster", "million transactions a second and machine"],
    places: || vec!["CX3", "CIB"],
    unit: "M/s",
    curves: || on_clusters(smallbank, Published { at: AT_CX3, value: 1.57, judged: RECALLED }),
    headlines: &[Headline {
        curves: "FaSST / DrTM+R (0.93 published)",
        point: "CX3",
        of: Value::On(SUCCESSFUL, AT_CX3),
        to: Value::Of(|| 0.93),
        published: Some(1.7),
        judged: RECALLED,
    }],
    claims: &[Claim {
        what: "FaSST is faster than DrTM+R's published rate on both clusters",
        ratios: &[
            (Value::On(SUCCESSFUL, AT_CX3), Value::Of(|| 0.93), Shape::Above(1.0)),
            (Value::On(SUCCESSFUL, AT_CIB), Value::Of(|| 0.93), Shape::Above(1.0)),
        ],
    }],
    rivals: None,
    fabrics: OnFabrics::Nothing("machines that are nodes and clients"),
};

/// Numbers of machines: the first ones are simulated, and all from [`SIMULATED`] on are extrapolated.
const SCALE: [u32; 7] = [2, 3, 6, 12, 24, 96, 192];
const SIMULATED: usize = 5;

fn simulated(operations: u64) -> Result<Vec<Point>, String> {
    let point = |(place, &machines): (usize, &u32)| {
        // Two machines have room for one backup.
        let load = Load { backups: (machines - 1).min(2) as u8, ..Load::paper(CX3, machines) };
        Ok(Point { x: place as f64, y: tatp(load, operations)?.ops_per_s / MILLION })
    };
    SCALE[..SIMULATED].iter().enumerate().map(point).collect()
}

/// Extrapolates the rate from the two largest simulated clusters. The number of packets of a transaction is that of the
/// machines that its requests go to. It differs from the number of requests by a term that is inversely proportional to
/// the number of machines, and so does the time that a transaction takes on each part of a machine.
fn extrapolated(simulated: &[Point]) -> Vec<Point> {
    let [one, other] = [SIMULATED - 2, SIMULATED - 1];
    let inverse = |place: usize| 1.0 / f64::from(SCALE[place]);
    let [time_one, time_other] = [one, other].map(|place| 1.0 / simulated[place].y);
    let slope = (time_one - time_other) / (inverse(one) - inverse(other));
    let time = |place| time_other + slope * (inverse(place) - inverse(other));
    (SIMULATED..SCALE.len()).map(|place| Point { x: place as f64, y: 1.0 / time(place) }).collect()
}

const SIMULATION: &str = "TATP, all transactions";
const MODEL: &str = "extrapolated from 12 and 24 machines";

/// The rate of a machine over the number of machines.
pub(super) static SCALES: Figure = Figure {
    name: "fasst-scale",
    title: "FaSST: TATP on CX3, over the number of machines",
    source: "Kalia et al., OSDI 2016",
    axes: ["machines", "million transactions a second and machine"],
    places: || vec!["2", "3", "6", "12", "24", "96", "192"],
    unit: "M/s",
    curves: || {
        let [simulated, extrapolated] = together(|operations| {
            let simulated = simulated(operations)?;
            let extrapolated = extrapolated(&simulated);
            Ok([simulated, extrapolated])
        });
        vec![curve(SIMULATION, simulated, Vec::new()), curve(MODEL, extrapolated, Vec::new())]
    },
    headlines: &[],
    claims: &[Claim {
        what: "from 6 machines to 24, the rate of a machine falls by less than 20 %",
        ratios: &[(
            Value::On(SIMULATION, At::Place(4)),
            Value::On(SIMULATION, At::Place(2)),
            Shape::Above(0.8),
        )],
    }],
    rivals: None,
    fabrics: OnFabrics::Nothing("machines that are nodes and clients"),
};
