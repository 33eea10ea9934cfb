//! A figure on a real fabric: ratios of measurements that alternate, compared with the paper's ratios. The absolute
//! times of one machine do not predict those of another machine; the ratios of its times may.
//!
//! Invariant: a ratio compares two measurements of the same round, so that a disturbance of the machine affects both.
//! The report is the median over all rounds. Exception: two peaks with different numbers of clients have no round in
//! common, so every round of one peak is compared with every round of the other peak.

use super::{
    At, ByLength, Curve, Drawn, Figure, MEASURED, Ops, Picture, Point, Predict, Published, Stores, json_lines,
};
use farside_bench::report::Table;
use farside_predict::system;
use farside_sim::hardware::{Distance, Platform};
use serde::Serialize;

/// The part that runs a fabric's chains. It decides which of the paper's platforms the fabric resembles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runner {
    /// An engine of the node: software, like the paper's `prism-sw`.
    Engine,
    /// The caller's own CPU on mapped memory, without involving the node's CPU, like the NIC of `prism-hw`.
    Caller,
}

/// Quartiles of a number over all rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// First quartile: a quarter of all rounds has a lower value.
    pub lower: f64,
    /// Median.
    pub median: f64,
    /// Third quartile: a quarter of all rounds has a higher value.
    pub upper: f64,
}

impl Spread {
    /// Returns the quartiles of `numbers`, of which there must be at least one.
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

/// Comparison of two systems or two ops by the ratio of one quantity.
#[derive(Clone, Debug)]
pub struct Ratio {
    /// Name of the position in the figure.
    pub point: String,
    /// Distance of the node, whose round trip is added to the fabric's own latency.
    pub distance: Distance,
    /// Names of the compared systems or ops: the numerator's, then the denominator's.
    pub things: [&'static str; 2],
    /// The quantity that is compared.
    pub quantity: Quantity,
    /// Medians over all rounds of the numerator and of the denominator, in the quantity's unit.
    pub medians: [f64; 2],
    /// Quartiles of the ratio over all rounds.
    pub ratio: Spread,
    /// Number of rounds.
    pub rounds: usize,
    /// The same ratio in the paper, if the paper has it.
    pub published: Option<f64>,
}

/// A measured quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// Mean latency of an operation in a round, in microseconds.
    Latency,
    /// Throughput in thousand operations per second.
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

/// A figure measured on a real fabric.
pub struct Measurement {
    /// The measured figure.
    pub figure: &'static Figure,
    /// Name of the fabric.
    pub fabric: &'static str,
    /// The comparisons.
    pub ratios: Vec<Ratio>,
    /// The comparisons as curves to draw.
    pub picture: Picture,
}

/// Throughput of all systems with `clients` clients in a closed loop.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// Number of clients. Each runs one operation at a time, in a closed loop.
    pub clients: u32,
    /// For each round, the operations per second of each system. Has at least one round.
    pub rounds: Vec<Vec<f64>>,
}

impl Loaded {
    fn rate(&self, system: usize) -> f64 {
        median(&self.rounds, system)
    }

    /// Mean latency in microseconds by Little's law: in a closed loop without think time, each client always has one
    /// operation in flight.
    fn latency_us(&self, system: usize) -> f64 {
        f64::from(self.clients) * 1e6 / self.rate(system)
    }
}

fn median(rounds: &[Vec<f64>], of: usize) -> f64 {
    Spread::of(rounds.iter().map(|round| round[of])).median
}

/// Quartiles over all rounds of the ratio of column `of` to column `to`.
fn by_round(rounds: &[Vec<f64>], of: usize, to: usize) -> Spread {
    Spread::of(rounds.iter().map(|round| round[of] / round[to]))
}

impl Measurement {
    /// Compares stores. `loads` is ordered by the number of clients and starts with one client.
    ///
    /// # Panics
    /// `loads` is empty.
    pub fn of_stores(
        figure: &'static Figure,
        stores: &Stores,
        fabric: &'static str,
        runner: Runner,
        distance: Distance,
        loads: &[Loaded],
    ) -> Measurement {
        let base = stores.systems.len() - 1;
        // The paper has no curve of stores on NICs with PRISM's operations, and none over other networks.
        let is_theirs = runner == Runner::Engine && distance == stores.distance;
        let curves = if is_theirs { (figure.curves)() } else { Vec::new() };
        let of_system =
            |system: usize| curves.iter().find(|curve| curve.is_in_software(stores.systems[system]));
        let published = |system, value: fn(&Curve) -> Option<f64>| {
            Some(value(of_system(system)?)? / value(of_system(base)?)?)
        };
        let title = |place: usize| system(stores.systems[place]).expect("the system is registered").title;
        let mut ratios = Vec::new();
        for load in loads {
            for system in 0..base {
                ratios.push(Ratio {
                    point: format!(
                        "with {} client{}",
                        load.clients,
                        if load.clients == 1 { "" } else { "s" }
                    ),
                    distance,
                    things: [title(system), title(base)],
                    quantity: Quantity::Latency,
                    medians: [load.latency_us(system), load.latency_us(base)],
                    // Latency is inverse to throughput, so the ratio is inverted.
                    ratio: by_round(&load.rounds, base, system),
                    rounds: load.rounds.len(),
                    published: published(system, Curve::low).filter(|_| load.clients == 1),
                });
            }
        }
        let best = |system: usize| {
            let by_rate = |a: &&Loaded, b: &&Loaded| a.rate(system).total_cmp(&b.rate(system));
            loads.iter().max_by(by_rate).expect("at least one load was measured")
        };
        let at_base = best(base);
        for system in 0..base {
            let at_system = best(system);
            let ratio = if at_system.clients == at_base.clients {
                by_round(&at_system.rounds, system, base)
            } else {
                let held_to_all = |rate: f64| at_base.rounds.iter().map(move |round| rate / round[base]);
                Spread::of(at_system.rounds.iter().flat_map(|round| held_to_all(round[system])))
            };
            ratios.push(Ratio {
                point: format!("peak, with {} and {}", at_system.clients, at_base.clients),
                distance,
                things: [title(system), title(base)],
                quantity: Quantity::Throughput,
                medians: [at_system.rate(system) / 1e3, at_base.rate(base) / 1e3],
                ratio,
                rounds: at_base.rounds.len(),
                published: published(system, Curve::peak),
            });
        }
        let (low, peak) = (loads[0].latency_us(base), at_base.rate(base));
        let curves = (0..=base).map(|system| Drawn {
            name: title(system),
            published: of_system(system).zip(of_system(base)).map_or(Vec::new(), |(of, to)| relative(of, to)),
            here: loads
                .iter()
                .map(|load| Point { x: load.rate(system) / peak, y: load.latency_us(system) / low })
                .collect(),
        });
        let picture = figure.picture(MEASURED, curves.collect(), stores.axes, Vec::new());
        Measurement { figure, fabric, ratios, picture }
    }

    /// Compares ops. For each distance and each round, `distances` holds the latency of each op in microseconds.
    ///
    /// # Panics
    /// A distance has no rounds.
    pub fn of_ops(
        figure: &'static Figure,
        ops: &Ops,
        fabric: &'static str,
        runner: Runner,
        distances: &[(Distance, Vec<Vec<f64>>)],
    ) -> Measurement {
        let base = ops.ops.iter().position(|&op| op == ops.base).expect("the base is one of the ops");
        let mut ratios = Vec::new();
        for &(distance, ref rounds) in distances {
            for (place, &op) in ops.ops.iter().enumerate().filter(|&(place, _)| place != base) {
                ratios.push(Ratio {
                    point: (ops.point)(op, distance).to_owned(),
                    distance,
                    things: [op.name(), ops.base.name()],
                    quantity: Quantity::Latency,
                    medians: [median(rounds, place), median(rounds, base)],
                    ratio: by_round(rounds, place, base),
                    rounds: rounds.len(),
                    published: (ops.published)(runner, op, distance),
                });
            }
        }
        let points = |y: fn(&Ratio) -> Option<f64>| {
            let point = |(x, ratio): (u32, &Ratio)| Some(Point { x: x.into(), y: y(ratio)? });
            (0..).zip(&ratios).filter_map(point).collect()
        };
        let curve = Drawn {
            name: ops.curve,
            published: points(|ratio| ratio.published),
            here: points(|ratio| Some(ratio.ratio.median)),
        };
        let of_distance = |&(distance, _): &(Distance, _)| {
            let others = ops.ops.iter().filter(|&&op| op != ops.base);
            others.map(move |&op| (ops.point)(op, distance))
        };
        let places = distances.iter().flat_map(of_distance).collect();
        let picture = figure.picture(MEASURED, vec![curve], ops.axes, places);
        Measurement { figure, fabric, ratios, picture }
    }

    /// Compares two stores. For each distribution of the keys and each of the figure's lengths, `measured` holds the
    /// operations per second of both in each round.
    ///
    /// # Panics
    /// A length has no rounds.
    pub fn of_lengths(
        figure: &'static Figure,
        lengths: &ByLength,
        fabric: &'static str,
        distance: Distance,
        measured: &[(&'static str, Vec<Vec<Vec<f64>>>)],
    ) -> Measurement {
        let things = lengths.systems.map(|kind| system(kind).expect("the system is registered").title);
        let name = |len: usize| if len < 1 << 10 { format!("{len} B") } else { format!("{} KiB", len >> 10) };
        let mut ratios = Vec::new();
        for (keys, by_length) in measured {
            ratios.extend(lengths.lengths.iter().zip(by_length).map(|(&(len, published), rounds)| Ratio {
                point: format!("{}, {keys}", name(len)),
                distance,
                things,
                quantity: Quantity::Throughput,
                medians: [median(rounds, 0) / 1e3, median(rounds, 1) / 1e3],
                ratio: by_round(rounds, 0, 1),
                rounds: rounds.len(),
                published,
            }));
        }
        let curves = measured.iter().map(|&(keys, ref by_length)| Drawn {
            name: keys,
            published: Vec::new(),
            here: by_length
                .iter()
                .zip(lengths.lengths)
                .map(|(rounds, &(len, _))| Point { x: len as f64, y: by_round(rounds, 0, 1).median })
                .collect(),
        });
        let picture = figure.picture(MEASURED, curves.collect(), lengths.axes, Vec::new());
        Measurement { figure, fabric, ratios, picture }
    }

    /// Formats a table for people: every measured ratio with the paper's ratio.
    pub fn table(&self) -> String {
        let columns =
            ["point", "distance", "compared", "medians", "unit", "ratio", "half within", "published"];
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
            "{}\nMeasured over {}, in {} rounds. Times depend on the machine: only ratios are compared.\n{table}",
            self.figure.title,
            self.fabric,
            self.ratios.iter().map(|ratio| ratio.rounds).max().unwrap_or(0),
        )
    }

    /// Formats every ratio as a JSON object on a line of its own, for programs.
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
        json_lines(self.ratios.iter().map(|ratio| Line {
            figure: self.figure.name,
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
        }))
    }
}

impl Runner {
    /// Returns the paper's platform that the runner resembles.
    pub(super) const fn platform(self) -> Platform {
        match self {
            Runner::Engine => Platform::PrismSw,
            Runner::Caller => Platform::PrismHw,
        }
    }
}

impl Curve {
    /// Whether the curve is of `system` on `prism-sw` and has published points.
    fn is_in_software(&self, system: &str) -> bool {
        let is_published = !self.published.is_empty();
        matches!(&self.predict, Predict::UnderLoad(load)
            if load.system == system && load.platform == Platform::PrismSw && is_published)
    }

    /// Returns the published latency at low load, in microseconds.
    fn low(&self) -> Option<f64> {
        self.published.iter().find(|of| matches!(of.at, At::Low(_))).map(|of| of.value)
    }

    /// Returns the published peak throughput, in million operations per second.
    fn peak(&self) -> Option<f64> {
        self.published.iter().find(|of| matches!(of.at, At::Peak)).map(|of| of.value)
    }
}

/// Returns the published points of `of`, with x divided by the peak of `to` and y by the low-load latency of `to`.
/// Skips points with an unknown coordinate.
fn relative(of: &Curve, to: &Curve) -> Vec<Point> {
    let Some((low, peak)) = to.low().zip(to.peak()) else { return Vec::new() };
    let points = of.published.iter().filter_map(Published::point);
    points.map(|Point { x, y }| Point { x: x / peak, y: y / low }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::{OnFabrics, draw};

    #[test]
    fn a_spread_has_the_quartiles_of_its_numbers() {
        let spread = Spread::of((1..=9).rev().map(f64::from));
        assert_eq!(spread, Spread { lower: 3.0, median: 5.0, upper: 7.0 });
        assert_eq!(Spread::of([2.0]), Spread { lower: 2.0, median: 2.0, upper: 2.0 });
        assert_eq!(Spread::of([1.0, 2.0]).median, 1.5);
    }

    fn stores_of(name: &str) -> (&'static Figure, &'static Stores) {
        let figure = Figure::named(name).expect("the figure exists");
        let OnFabrics::Stores(stores) = &figure.fabrics else { panic!("{name} has stores") };
        (figure, stores)
    }

    fn ops_of(name: &str) -> (&'static Figure, &'static Ops) {
        let figure = Figure::named(name).expect("the figure exists");
        let OnFabrics::Ops(ops) = &figure.fabrics else { panic!("{name} has ops") };
        (figure, ops)
    }

    /// Loads of two stores. With one client, an operation takes 10 us on the first store and 20 us on the second. In
    /// one of three rounds, a disturbance slows down both stores.
    fn loads() -> [Loaded; 2] {
        let loaded =
            |clients, rounds: [[f64; 2]; 3]| Loaded { clients, rounds: rounds.map(Vec::from).into() };
        let one = loaded(1, [[1e5, 5e4], [1e4, 5e3], [1e5, 5e4]]);
        let eight = loaded(8, [[4e5, 4e5], [4e5, 4e5], [4e4, 4e4]]);
        [one, eight]
    }

    #[test]
    fn stores_are_compared_by_latency_at_each_load_and_by_peak() {
        let (figure, stores) = stores_of("prism-3");
        let measured =
            |runner| Measurement::of_stores(figure, stores, "udp", runner, Distance::Rack, &loads());
        let software = measured(Runner::Engine);
        let found: Vec<_> = software.ratios.iter().map(|ratio| (&*ratio.point, ratio.ratio.median)).collect();
        assert_eq!(found, [("with 1 client", 0.5), ("with 8 clients", 1.0), ("peak, with 8 and 8", 1.0)]);
        assert_eq!(software.ratios[0].medians, [10.0, 20.0]);
        assert_eq!(software.ratios[2].medians, [400.0, 400.0]);
        let published = |of: &Measurement| of.ratios.iter().map(|ratio| ratio.published).collect::<Vec<_>>();
        assert_eq!(published(&software), [Some(6.5 / 13.4), None, Some(8.2 / 6.6)]);
        assert_eq!(published(&measured(Runner::Caller)), [None; 3]);
        let csv = software.picture.csv();
        let [of, to] =
            [0, 1].map(|place| system(stores.systems[place]).expect("the system is registered").title);
        let has = |line: &str| csv.contains(&format!("\n{to},{line}"));
        assert!(has("measured,0.125,1\n") && has("published,"), "{csv}");
        assert!(draw::svg(&software.picture).starts_with("<svg"));
        assert!(
            draw::svg(&measured(Runner::Caller).picture).starts_with("<svg"),
            "a picture needs no published points"
        );
        let line: serde_json::Value =
            serde_json::from_str(software.json().lines().next().expect("a line")).unwrap();
        assert_eq!((&line["of"], &line["to"], &line["ratio"]), (&of.into(), &to.into(), &0.5.into()));
    }

    #[test]
    fn ops_are_compared_with_a_read_and_an_indirect_read_with_two() {
        let of = |name, runner, distances: &[(Distance, Vec<Vec<f64>>)]| {
            let (figure, ops) = ops_of(name);
            Measurement::of_ops(figure, ops, "udp", runner, distances).ratios
        };
        let five = vec![vec![4.0, 4.0, 5.0, 6.0, 8.0]];
        let ops = |distance| of("prism-1", Runner::Engine, &[(distance, five.clone())]);
        let direct = ops(Distance::Direct);
        let found: Vec<_> = direct.iter().map(|ratio| (ratio.things[0], ratio.ratio.median)).collect();
        assert_eq!(
            found,
            [("WRITE", 1.0), ("indirect READ", 1.25), ("ALLOCATE", 1.5), ("enhanced CAS", 2.0)]
        );
        assert_eq!(direct[1].published, Some(5.0 / 5.3));
        assert_eq!(ops(Distance::Cluster)[1].published, None, "figure 1 has one distance: a single cable");
        let two = |runner| {
            let distances =
                [(Distance::Direct, vec![vec![1.0, 2.0]]), (Distance::Rack, vec![vec![1.0, 4.0]])];
            of("prism-2", runner, &distances)
        };
        let published = |runner| two(runner).into_iter().map(|ratio| ratio.published).collect::<Vec<_>>();
        assert_eq!(published(Runner::Engine), [None, Some(5.8 / (2.0 * (5.3 + 0.6)))]);
        assert_eq!(published(Runner::Caller), [None, Some(3.1 / 6.1)]);
        assert_eq!(two(Runner::Engine)[1].ratio.median, 0.25);
    }
}
