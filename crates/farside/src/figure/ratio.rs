//! What a figure comes to on a real fabric: how things that were measured in turn compare, beside how they do in the
//! paper. A machine's own times say nothing of another's; what two things have of one another may.
//!
//! Invariant: a ratio is that of two things in one round, and what is told is the median over rounds: whatever else the
//! machine did in the meantime met both. Two peaks that come with different numbers of clients have no round in common,
//! so there every round of one is held to every round of the other.

use super::load::System;
use super::published::{FIGURE_3, FIGURE_4, KvCurve};
use super::{Curve, Figure, MEASURED, Picture, Point};
use farside_bench::report::Table;
use farside_sim::hardware::{Distance, Platform, Testbed};
use farside_sim::micro::{FIGURE_1, FIGURE_2, MicroOp};
use serde::Serialize;

/// What runs the chains of a fabric, and so which of the papers' machines it resembles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runner {
    /// An engine of the node: software, as the paper's `prism-sw`.
    Engine,
    /// The caller's own CPU on mapped memory, without a word to the node, as the NIC of `prism-hw` would.
    Caller,
}

/// Half of all rounds lie between the outer two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// A quarter of all rounds is lower.
    pub lower: f64,
    /// The one in the middle.
    pub median: f64,
    /// A quarter of all rounds is higher.
    pub upper: f64,
}

impl Spread {
    /// Of at least one number.
    pub fn of(numbers: impl IntoIterator<Item = f64>) -> Spread {
        let mut sorted: Vec<f64> = numbers.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let place = (sorted.len() - 1) as f64 * share;
            let (below, above) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
            below + (above - below) * place.fract()
        };
        Spread { lower: at(0.25), median: at(0.5), upper: at(0.75) }
    }
}

/// How one thing compares with another.
#[derive(Clone, Debug)]
pub struct Ratio {
    /// Where in the figure.
    pub point: String,
    /// How far away the node was made to be, beside what is there.
    pub distance: Distance,
    /// Of what, and to what.
    pub things: [&'static str; 2],
    /// What of them.
    pub quantity: Quantity,
    /// The median of each.
    pub medians: [f64; 2],
    /// Their ratio, round by round.
    pub ratio: Spread,
    /// How many rounds there were.
    pub rounds: usize,
    /// The same ratio in the paper, if it has it.
    pub published: Option<f64>,
}

/// What was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// How long an operation takes, on average over a round; microseconds.
    Latency,
    /// Operations a second, in thousands.
    Throughput,
}

impl Quantity {
    const fn name(self) -> &'static str {
        match self {
            Quantity::Latency => "latency",
            Quantity::Throughput => "throughput",
        }
    }

    const fn unit(self) -> &'static str {
        match self {
            Quantity::Latency => "us",
            Quantity::Throughput => "k/s",
        }
    }
}

/// What was measured of a figure.
#[derive(Clone, Debug)]
pub struct Measurement {
    /// Which.
    pub figure: Figure,
    /// Over what.
    pub fabric: &'static str,
    /// How things compare.
    pub ratios: Vec<Ratio>,
    /// The same, as curves.
    pub picture: Picture,
}

/// Both systems under a closed loop of so many clients: operations a second in each round, in the order of
/// [`System::ALL`].
#[derive(Clone, Debug)]
pub struct Loaded {
    /// Each asks one operation at a time, and the next when it is answered.
    pub clients: u32,
    /// At least one.
    pub rounds: Vec<[f64; 2]>,
}

impl Loaded {
    fn rate(&self, system: usize) -> f64 {
        Spread::of(self.rounds.iter().map(|round| round[system])).median
    }

    /// By Little's law: whoever is not being answered has not asked.
    fn latency_us(&self, system: usize) -> f64 {
        f64::from(self.clients) * 1e6 / self.rate(system)
    }
}

/// PRISM-KV and Pilaf, as they are called there.
const SYSTEMS: [&str; 2] = ["PRISM-KV", "Pilaf"];
const _: () = assert!(matches!(System::ALL, [System::PrismKv, System::Pilaf]));

impl Measurement {
    /// PRISM's figures 3 and 4, from one client on.
    ///
    /// # Panics
    /// If nothing was measured, or it is no such figure.
    pub fn of_kv(
        figure: Figure,
        fabric: &'static str,
        runner: Runner,
        distance: Distance,
        loads: &[Loaded],
    ) -> Measurement {
        let curves = match figure {
            Figure::Prism3 => &FIGURE_3,
            Figure::Prism4 => &FIGURE_4,
            _ => panic!("{} has no key-value stores", figure.name()),
        };
        // There is no curve of stores whose NIC knows PRISM's operations, nor of other networks.
        let is_theirs = runner == Runner::Engine && distance == Testbed::PRISM_APPLICATIONS.distance;
        let published = is_theirs.then(|| in_software(curves));
        let ratio = |point, quantity, medians, ratio, rounds, published| Ratio {
            point,
            distance,
            things: SYSTEMS,
            quantity,
            medians,
            ratio,
            rounds,
            published,
        };
        let mut ratios = Vec::new();
        for load in loads {
            let point = format!("with {} client{}", load.clients, if load.clients == 1 { "" } else { "s" });
            let low_load =
                published.filter(|_| load.clients == 1).map(|[prism, pilaf]| prism.low.1 / pilaf.low.1);
            // The more a second, the shorter each: the ratio is the other way round.
            let spread = Spread::of(load.rounds.iter().map(|[prism, pilaf]| pilaf / prism));
            let latencies = [load.latency_us(0), load.latency_us(1)];
            ratios.push(ratio(point, Quantity::Latency, latencies, spread, load.rounds.len(), low_load));
        }
        let best = [0, 1].map(|system| {
            let by_rate = |a: &&Loaded, b: &&Loaded| a.rate(system).total_cmp(&b.rate(system));
            loads.iter().max_by(by_rate).expect("something was measured")
        });
        let [of_prism, of_pilaf] = best.map(|load| &load.rounds);
        let spread = if best[0].clients == best[1].clients {
            Spread::of(of_prism.iter().map(|[prism, pilaf]| prism / pilaf))
        } else {
            let held_to_all = |prism: f64| of_pilaf.iter().map(move |[_, pilaf]| prism / pilaf);
            Spread::of(of_prism.iter().flat_map(|[prism, _]| held_to_all(*prism)))
        };
        let peaks = [best[0].rate(0), best[1].rate(1)];
        let point = format!("peak, with {} and {}", best[0].clients, best[1].clients);
        let at_peak = published.map(|[prism, pilaf]| prism.peak / pilaf.peak);
        let in_thousands = peaks.map(|rate| rate / 1e3);
        ratios.push(ratio(point, Quantity::Throughput, in_thousands, spread, best[1].rounds.len(), at_peak));

        let (low, peak) = (loads[0].latency_us(1), peaks[1]);
        let curves = [0, 1].map(|system| Curve {
            name: SYSTEMS[system],
            published: published.map_or(Vec::new(), |both| relative(both[system], both[1])),
            here: loads
                .iter()
                .map(|load| Point { x: load.rate(system) / peak, y: load.latency_us(system) / low })
                .collect(),
        });
        let axes = ["throughput / Pilaf's peak", "latency / Pilaf's at low load"];
        Measurement {
            figure,
            fabric,
            ratios,
            picture: Picture::of(figure, MEASURED, curves.into(), axes, Vec::new()),
        }
    }

    /// PRISM's figure 1: how long each op took in each round, in microseconds, in the order of [`MicroOp::FIGURE_1`].
    ///
    /// # Panics
    /// If nothing was measured.
    pub fn of_ops(
        fabric: &'static str,
        runner: Runner,
        distance: Distance,
        rounds: &[[f64; MicroOp::FIGURE_1.len()]],
    ) -> Measurement {
        let bar =
            |place: usize| FIGURE_1[place].1[Platform::ALL.iter().position(|&p| p == runner.platform())?];
        let reads = MicroOp::FIGURE_1.iter().position(|&op| op == MicroOp::Read).expect("it is one of them");
        let mut ratios = Vec::new();
        for (place, op) in MicroOp::FIGURE_1.into_iter().enumerate().filter(|&(_, op)| op != MicroOp::Read) {
            ratios.push(Ratio {
                point: op.name().to_owned(),
                distance,
                things: [op.name(), MicroOp::Read.name()],
                quantity: Quantity::Latency,
                medians: [place, reads].map(|of| Spread::of(rounds.iter().map(|round| round[of])).median),
                ratio: Spread::of(rounds.iter().map(|round| round[place] / round[reads])),
                rounds: rounds.len(),
                // Other distances than the paper's one cable have no bars.
                published: bar(place)
                    .zip(bar(reads))
                    .filter(|_| distance == Testbed::PRISM_MICRO.distance)
                    .map(|(of, to)| of / to),
            });
        }
        let places = ratios.iter().map(|ratio| ratio.things[0]).collect();
        let curves = vec![of_ratios("over READ", &ratios)];
        let axes = ["op", "latency / READ's"];
        let picture = Picture::of(Figure::Prism1, MEASURED, curves, axes, places);
        Measurement { figure: Figure::Prism1, fabric, ratios, picture }
    }

    /// PRISM's figure 2: how long an indirect READ took, and two READs in its place, in each round at each distance, in
    /// microseconds.
    ///
    /// # Panics
    /// If nothing was measured.
    pub fn of_indirection(
        fabric: &'static str,
        runner: Runner,
        distances: &[(Distance, Vec<[f64; 2]>)],
    ) -> Measurement {
        let of_distance = |(distance, rounds): &(Distance, Vec<[f64; 2]>)| Ratio {
            point: distance.name().to_owned(),
            distance: *distance,
            things: [MicroOp::IndirectRead.name(), MicroOp::TwoReads.name()],
            quantity: Quantity::Latency,
            medians: [0, 1].map(|of| Spread::of(rounds.iter().map(|round| round[of])).median),
            ratio: Spread::of(rounds.iter().map(|[indirect, two]| indirect / two)),
            rounds: rounds.len(),
            published: runner.indirection(*distance),
        };
        let ratios: Vec<Ratio> = distances.iter().map(of_distance).collect();
        let places = distances.iter().map(|(distance, _)| distance.name()).collect();
        let curves = vec![of_ratios("indirect READ", &ratios)];
        let axes = ["network", "latency / that of 2 x READ"];
        let picture = Picture::of(Figure::Prism2, MEASURED, curves, axes, places);
        Measurement { figure: Figure::Prism2, fabric, ratios, picture }
    }

    /// For people: every ratio beside the paper's.
    pub fn table(&self) -> String {
        let columns =
            ["point", "distance", "of what", "medians", "unit", "ratio", "half within", "published"];
        let mut table = Table::new(columns);
        for ratio in &self.ratios {
            let Spread { lower, median, upper } = ratio.ratio;
            let [of, to] = ratio.medians.map(|value| format!("{value:.2}"));
            table.push([
                ratio.point.clone(),
                ratio.distance.name().to_owned(),
                format!("{} of {} to {}", ratio.quantity.name(), ratio.things[0], ratio.things[1]),
                format!("{of} to {to}"),
                ratio.quantity.unit().to_owned(),
                format!("{median:.2}"),
                format!("{lower:.2} to {upper:.2}"),
                ratio.published.map_or("-".to_owned(), |published| format!("{published:.2}")),
            ]);
        }
        format!(
            "{}\nMeasured over {}, in {} rounds: of this machine's times only ratios are compared.\n{table}",
            self.figure.title(),
            self.fabric,
            self.ratios.iter().map(|ratio| ratio.rounds).max().unwrap_or(0),
        )
    }

    /// For programs: every ratio as a JSON object on a line of its own.
    pub fn json(&self) -> String {
        #[derive(Serialize)]
        struct Line<'a> {
            figure: &'a str,
            fabric: &'a str,
            distance: &'a str,
            point: &'a str,
            quantity: &'a str,
            unit: &'a str,
            of: &'a str,
            to: &'a str,
            of_median: f64,
            to_median: f64,
            ratio: f64,
            ratio_lower: f64,
            ratio_upper: f64,
            rounds: usize,
            published: Option<f64>,
        }
        let lines = self.ratios.iter().map(|ratio| {
            let line = Line {
                figure: self.figure.name(),
                fabric: self.fabric,
                distance: ratio.distance.name(),
                point: &ratio.point,
                quantity: ratio.quantity.name(),
                unit: ratio.quantity.unit(),
                of: ratio.things[0],
                to: ratio.things[1],
                of_median: ratio.medians[0],
                to_median: ratio.medians[1],
                ratio: ratio.ratio.median,
                ratio_lower: ratio.ratio.lower,
                ratio_upper: ratio.ratio.upper,
                rounds: ratio.rounds,
                published: ratio.published,
            };
            serde_json::to_string(&line).expect("plain data") + "\n"
        });
        lines.collect()
    }
}

impl Runner {
    const fn platform(self) -> Platform {
        match self {
            Runner::Engine => Platform::PrismSw,
            Runner::Caller => Platform::PrismHw,
        }
    }

    /// What an indirect READ is to two READs there. Figure 2 has two READs of plain RDMA alone; those of software are
    /// figure 1's, twice, each over the network.
    fn indirection(self, distance: Distance) -> Option<f64> {
        let place = Distance::ALL.iter().skip(1).position(|&far| far == distance)?;
        let of = |platform: Platform| {
            let (.., points) = FIGURE_2.into_iter().find(|&(of, ..)| of == platform)?;
            Some(points[place])
        };
        let two_reads = match self {
            Runner::Caller => of(Platform::Rdma)?,
            Runner::Engine => {
                let (_, bars) = FIGURE_1.into_iter().find(|&(op, _)| op == MicroOp::Read)?;
                let read = bars[Platform::ALL.iter().position(|&of| of == Platform::PrismSw)?]?;
                2.0 * (read + distance.round_trip_ns() as f64 / 1e3)
            }
        };
        Some(of(self.platform())? / two_reads)
    }
}

/// The two curves whose chains software runs.
fn in_software(curves: &'static [KvCurve; 3]) -> [&'static KvCurve; 2] {
    System::ALL.map(|system| {
        let curve = curves.iter().find(|of| of.system == system && of.platform == Platform::PrismSw);
        curve.expect("both were measured in software")
    })
}

/// The points of a published curve that are known both ways, as shares of Pilaf's low load and peak.
fn relative(of: &KvCurve, pilaf: &KvCurve) -> Vec<Point> {
    let low = of.low.0.map(|x| (x, of.low.1));
    let points = low.into_iter().chain(of.points.iter().copied());
    points.map(|(x, y)| Point { x: x / pilaf.peak, y: y / pilaf.low.1 }).collect()
}

fn of_ratios(name: &'static str, ratios: &[Ratio]) -> Curve {
    let places = || (0u32..).map(f64::from).zip(ratios);
    Curve {
        name,
        published: places().filter_map(|(x, ratio)| Some(Point { x, y: ratio.published? })).collect(),
        here: places().map(|(x, ratio)| Point { x, y: ratio.ratio.median }).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::draw;

    #[test]
    fn a_spread_is_its_quartiles() {
        let spread = Spread::of((1..=9).rev().map(f64::from));
        assert_eq!(spread, Spread { lower: 3.0, median: 5.0, upper: 7.0 });
        assert_eq!(Spread::of([2.0]), Spread { lower: 2.0, median: 2.0, upper: 2.0 });
        assert_eq!(Spread::of([1.0, 2.0]).median, 1.5);
    }

    /// One client of PRISM-KV takes 10 us and one of Pilaf 20; one round in three is disturbed, in both.
    fn loads() -> [Loaded; 2] {
        let one = Loaded { clients: 1, rounds: vec![[1e5, 5e4], [1e4, 5e3], [1e5, 5e4]] };
        let eight = Loaded { clients: 8, rounds: vec![[4e5, 4e5], [4e5, 4e5], [4e4, 4e4]] };
        [one, eight]
    }

    #[test]
    fn stores_are_compared_by_latency_at_each_load_and_by_their_peaks() {
        let measured = |runner| Measurement::of_kv(Figure::Prism3, "udp", runner, Distance::Rack, &loads());
        let software = measured(Runner::Engine);
        let told: Vec<_> = software.ratios.iter().map(|ratio| (&*ratio.point, ratio.ratio.median)).collect();
        assert_eq!(told, [("with 1 client", 0.5), ("with 8 clients", 1.0), ("peak, with 8 and 8", 1.0)]);
        assert_eq!(software.ratios[0].medians, [10.0, 20.0]);
        assert_eq!(software.ratios[2].medians, [400.0, 400.0]);
        let published = |of: &Measurement| of.ratios.iter().map(|ratio| ratio.published).collect::<Vec<_>>();
        assert_eq!(published(&software), [Some(6.5 / 13.4), None, Some(8.2 / 6.6)]);
        assert_eq!(published(&measured(Runner::Caller)), [None; 3]);
        let csv = software.picture.csv();
        assert!(csv.contains("\nPilaf,measured,0.125,1\n") && csv.contains("\nPilaf,published,"), "{csv}");
        assert!(draw::svg(&software.picture).starts_with("<svg"));
        assert!(
            draw::svg(&measured(Runner::Caller).picture).starts_with("<svg"),
            "also without published points"
        );
        let line: serde_json::Value =
            serde_json::from_str(software.json().lines().next().expect("a line")).unwrap();
        assert_eq!(
            (&line["of"], &line["to"], &line["ratio"]),
            (&"PRISM-KV".into(), &"Pilaf".into(), &0.5.into())
        );
    }

    #[test]
    fn ops_are_compared_with_reads_and_an_indirect_one_with_two() {
        let ops =
            |distance| Measurement::of_ops("udp", Runner::Engine, distance, &[[4.0, 4.0, 5.0, 6.0, 8.0]]);
        let direct = ops(Distance::Direct);
        let told: Vec<_> = direct.ratios.iter().map(|ratio| (ratio.things[0], ratio.ratio.median)).collect();
        assert_eq!(told, [("WRITE", 1.0), ("indirect READ", 1.25), ("ALLOCATE", 1.5), ("enhanced CAS", 2.0)]);
        assert_eq!(direct.ratios[1].published, Some(5.0 / 5.3));
        assert_eq!(ops(Distance::Cluster).ratios[1].published, None, "one cable is all that figure 1 has");
        let distances = [(Distance::Direct, vec![[1.0, 2.0]]), (Distance::Rack, vec![[1.0, 4.0]])];
        let two = |runner| Measurement::of_indirection("shm", runner, &distances).ratios;
        let published = |runner| two(runner).into_iter().map(|ratio| ratio.published).collect::<Vec<_>>();
        assert_eq!(published(Runner::Engine), [None, Some(5.8 / (2.0 * (5.3 + 0.6)))]);
        assert_eq!(published(Runner::Caller), [None, Some(3.1 / 6.1)]);
        assert_eq!(two(Runner::Engine)[1].ratio.median, 0.25);
    }
}
