//! The papers' figures as data: their published numbers, the prediction of each curve, and the claims about the curves.
//! [`ratio`] compares the figures with measurements on real fabrics.
//!
//! Each figure is an entry of [`FIGURES`]; the file of its paper defines the figure.
//!
//! Invariant: no prediction uses a published number of an application. Such numbers are only compared with predictions.
//! Invariant: each published point has a condition that judges its prediction, or states why it has none.

mod chequer;
pub mod draw;
mod fasst;
mod fasst_txn;
mod prism;
pub mod ratio;
mod smart;
mod synchronization;
pub mod whatif;

use farside_bench::report::Table;
use farside_predict::{Bed, Load, Measured};
use farside_sim::hardware::Distance;
use farside_sim::micro::MicroOp;
use ratio::Runner;
use serde::Serialize;
use std::cell::RefCell;
use std::rc::Rc;

/// All figures of this release.
pub static FIGURES: [&Figure; 43] = [
    &prism::FIGURE_1,
    &prism::FIGURE_2,
    &prism::FIGURE_3,
    &prism::FIGURE_4,
    &prism::FIGURE_6,
    &prism::FIGURE_7,
    &prism::FIGURE_9,
    &prism::FIGURE_10,
    &synchronization::SECTION_4,
    &synchronization::ATOMICS,
    &synchronization::PADDING,
    &synchronization::LATCHES,
    &synchronization::OPTIMISTIC,
    &synchronization::SIZE,
    &synchronization::ZIPF,
    &synchronization::BTREE,
    &chequer::FIGURE_7,
    &chequer::FIGURE_8,
    &chequer::OPEN,
    &chequer::MODES_OF_PUT,
    &chequer::READS_OF_GET,
    &smart::FIGURE_3,
    &smart::FIGURE_3_BYTES,
    &smart::FIGURE_11,
    &smart::FIGURE_11_LIMITS,
    &smart::FIGURE_12,
    &smart::FIGURE_13,
    &smart::FIGURE_14,
    &smart::FIGURE_15,
    &smart::FIGURE_16,
    &smart::FIGURE_17,
    &smart::FIGURE_18,
    &smart::FIGURE_18_KEYS,
    &smart::FIGURE_18_VALUES,
    &smart::MISSES,
    &fasst::RPC_READ,
    &fasst::QPS,
    &fasst::SHARING,
    &fasst::DOORBELL,
    &fasst::DOORBELL_RATE,
    &fasst_txn::TATP,
    &fasst_txn::SMALLBANK,
    &fasst_txn::SCALES,
];

/// A figure of a paper, or the numbers of one of its sections.
pub struct Figure {
    /// Name in commands and reports.
    pub name: &'static str,
    /// Title of the figure.
    pub title: &'static str,
    /// The paper, and the figure or section in it.
    pub source: &'static str,
    /// Labels of the horizontal and the vertical axis.
    axes: [&'static str; 2],
    /// Names of the places on the horizontal axis. Empty if that axis is the throughput, in million operations per
    /// second.
    places: fn() -> Vec<&'static str>,
    /// Unit of the values at the places.
    unit: &'static str,
    curves: fn() -> Vec<Curve>,
    /// Published comparisons of curves, for figures whose curves are not available.
    headlines: &'static [Headline],
    claims: &'static [Claim],
    rivals: Option<Rivals>,
    /// The part of the figure that a real fabric can reproduce.
    pub fabrics: OnFabrics,
}

/// A curve: its prediction and its published points.
struct Curve {
    /// Name in the legend.
    name: &'static str,
    predict: Predict,
    published: Vec<Published>,
    /// Reason why the curve has no published points, if it has none.
    unpublished: &'static str,
}

/// Way to predict a curve.
enum Predict {
    /// Function from the index of a place to the predicted value; `None` where the curve has no point.
    Each(Box<dyn Fn(usize) -> Option<f64>>),
    /// Simulation of a system with increasing numbers of clients: mean latency over throughput.
    UnderLoad(Box<Load>),
    /// Simulation of a system with a fixed number of clients: mean latency for each place, whose keys have this Zipf
    /// coefficient.
    UnderSkew { load: Box<Load>, clients: u32, coefficients: &'static [f64] },
    /// Simulation of a system with these numbers of clients: the highest million operations per second, for each place,
    /// whose keys have this Zipf coefficient.
    PeakUnderSkew { load: Box<Load>, clients: &'static [u32], coefficients: &'static [f64] },
    /// Simulation of a system with a fixed number of clients: a value of the measurement for each place, whose values
    /// have this many bytes.
    ByLength { load: Box<Load>, clients: u32, lengths: &'static [usize], value: fn(&Measured) -> f64 },
    /// Simulation of a system: million operations per second for each place, which has this number of clients.
    ByClients { load: Box<Load>, clients: &'static [u32] },
    /// Function from the index of a place and the number of simulated operations to a value that may be missing because
    /// of an error.
    Found(Box<Find>),
    /// Function from the number of simulated operations to the points.
    Points(Box<FindAll>),
}

/// Finds the value of a place.
type Find = dyn Fn(usize, u64) -> Result<f64, String>;

/// Finds the points of a curve: values over the indexes of places, or over operations per second.
type FindAll = dyn Fn(u64) -> Result<Vec<Point>, String>;

/// Predictions of several curves that are found together.
fn together<const N: usize>(find: impl Fn(u64) -> Result<[Vec<Point>; N], String> + 'static) -> [Predict; N] {
    type Found<const N: usize> = RefCell<Option<Result<[Vec<Point>; N], String>>>;
    let (found, find) = (Rc::new(Found::<N>::default()), Rc::new(find));
    std::array::from_fn(|index| {
        let (found, find) = (Rc::clone(&found), Rc::clone(&find));
        Predict::Points(Box::new(move |operations| {
            let mut found = found.borrow_mut();
            let curves = found.get_or_insert_with(|| find(operations));
            curves.as_ref().map(|curves| curves[index].clone()).map_err(String::clone)
        }))
    })
}

/// A published number, and the condition on its prediction.
#[derive(Clone, Copy)]
struct Published {
    at: At,
    value: f64,
    judged: Shape,
}

/// Position of a number on its curve.
#[derive(Clone, Copy)]
enum At {
    /// Index of a place on the horizontal axis.
    Place(usize),
    /// The latency with one client. Holds the throughput of that point in the paper, in million operations per second,
    /// if the figure shows it.
    Low(Option<f64>),
    /// The latency at this throughput, in million operations per second.
    Throughput(f64),
    /// The highest throughput, in million operations per second.
    Peak,
    /// The latency at the highest throughput.
    LatencyAtPeak,
}

/// Condition on a ratio.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shape {
    /// The ratio differs from 1 by at most this share.
    Within(f64),
    /// The ratio is less than this.
    Below(f64),
    /// The ratio is greater than this.
    Above(f64),
    /// The ratio is at least this.
    AtLeast(f64),
    /// There is no condition: the ratio is only reported. Holds the reason.
    Reported(&'static str),
}

impl Shape {
    /// Returns whether `ratio` meets the condition; `None` if there is no condition.
    fn holds(self, ratio: f64) -> Option<bool> {
        match self {
            Shape::Within(share) => Some((ratio - 1.0).abs() <= share + 1e-9),
            Shape::Below(most) => Some(ratio < most),
            Shape::Above(least) => Some(ratio > least),
            Shape::AtLeast(least) => Some(ratio >= least),
            Shape::Reported(_) => None,
        }
    }
}

/// A property of the paper's curves that the predicted curves must have too: every ratio meets its condition.
pub struct Claim {
    /// The claim in words.
    what: &'static str,
    /// Numerator, denominator, and the condition on their ratio.
    ratios: &'static [(Value, Value, Shape)],
}

/// A ratio of two values of curves that the paper states in words.
struct Headline {
    /// Names of the curves.
    curves: &'static str,
    /// Position on the curves.
    point: &'static str,
    /// Numerator.
    of: Value,
    /// Denominator.
    to: Value,
    /// The paper's number; `None` if it has none.
    published: Option<f64>,
    judged: Shape,
}

/// Systems to which the figure compares another one. A comparison is worth what its rival is worth: a headline is
/// compared only if all judged numbers of its rivals are met.
struct Rivals {
    /// Names with which the rivals' curves begin.
    names: &'static [&'static str],
    /// Predicts numbers of the rivals that are on no curve, from the number of simulated operations.
    numbers: fn(u64) -> Result<Vec<Row>, String>,
}

/// A predicted value that a claim or a headline compares.
#[derive(Clone, Copy)]
enum Value {
    /// A value on the curve of this name.
    On(&'static str, At),
    /// A computed value that is on no curve.
    Of(fn() -> f64),
}

/// The part of a figure that a real fabric can reproduce.
pub enum OnFabrics {
    /// Latencies of single ops, relative to one op.
    Ops(Ops),
    /// Stores under load, relative to one of them.
    Stores(Stores),
    /// Two stores with values of several lengths, relative to each other.
    ByLength(ByLength),
    /// No part, because no fabric of this project has the figure's subject. The text names the subject.
    Nothing(&'static str),
}

/// Ops of a figure that a real fabric can measure.
pub struct Ops {
    /// The ops, in the order of measurement.
    pub ops: &'static [MicroOp],
    /// The op to which the others are compared.
    pub base: MicroOp,
    /// Default distances between the client and the node.
    pub distances: &'static [Distance],
    curve: &'static str,
    axes: [&'static str; 2],
    point: fn(MicroOp, Distance) -> &'static str,
    /// Published latency of an op divided by that of the base; `None` if the paper has no such number.
    published: fn(Runner, MicroOp, Distance) -> Option<f64>,
}

/// Stores of a figure that a real fabric can measure.
pub struct Stores {
    /// Name of the YCSB workload.
    pub workload: &'static str,
    /// Kinds of the stores' systems. All others are compared with the last one.
    pub systems: &'static [&'static str],
    /// Default distance between the clients and the node.
    pub distance: Distance,
    axes: [&'static str; 2],
}

/// Stores of a figure that a real fabric can measure with values of several lengths.
pub struct ByLength {
    /// Kinds of the stores' systems. The first is compared with the second.
    pub systems: [&'static str; 2],
    /// Properties that make YCSB's workload A this figure's.
    pub properties: &'static [&'static str],
    /// Lengths of values in bytes, each with the published ratio of the throughputs, if the paper has it.
    pub lengths: &'static [(usize, Option<f64>)],
    /// Default number of records.
    pub records: u64,
    /// Number of values that each client caches.
    pub cached: usize,
    /// Default distance between the clients and the node.
    pub distance: Distance,
    axes: [&'static str; 2],
}

impl Figure {
    /// Returns the figure with this name.
    pub fn named(name: &str) -> Option<&'static Figure> {
        FIGURES.into_iter().find(|figure| figure.name == name)
    }

    /// Predicts the figure. Each point under load is measured over `operations` simulated operations.
    ///
    /// # Errors
    /// A simulated operation failed.
    pub fn predict(&'static self, operations: u64) -> Result<Prediction, String> {
        let places = (self.places)();
        let x_unit = if places.is_empty() { MILLION } else { 1.0 };
        let (mut curves, mut all) = (Vec::new(), Vec::new());
        let mut rows = match &self.rivals {
            Some(rivals) => (rivals.numbers)(operations)?,
            None => Vec::new(),
        };
        for curve in (self.curves)() {
            let points = curve.predict.points(places.len(), operations)?;
            let row = |at: At, published, judged| Row {
                curve: curve.name,
                point: at.name(&places),
                unit: at.unit(self.unit),
                published,
                predicted: at.on(&points),
                judged,
            };
            rows.extend(curve.published.iter().map(|of| row(of.at, Some(of.value), of.judged)));
            if curve.published.is_empty() {
                let at = match places.is_empty() {
                    true => vec![At::Low(None), At::Peak],
                    false => (0..places.len()).map(At::Place).collect(),
                };
                rows.extend(at.into_iter().map(|at| row(at, None, Shape::Reported(curve.unpublished))));
            }
            curves.push(Drawn {
                name: curve.name,
                published: curve.published.iter().filter_map(Published::point).collect(),
                here: points.iter().map(|&Point { x, y }| Point { x: x / x_unit, y }).collect(),
            });
            all.push((curve.name, points));
        }
        let poor = self.rivals.as_ref().map_or(Vec::new(), |rivals| rivals.poor(&rows));
        let headlines = self.headlines.iter().map(|headline| {
            let is_poor = |value: &Value| {
                value.curve().is_some_and(|curve| poor.iter().any(|name| curve.starts_with(name)))
            };
            let is_compared = !is_poor(&headline.of) && !is_poor(&headline.to);
            Row {
                curve: headline.curves,
                point: headline.point.to_owned(),
                unit: "times",
                published: headline.published,
                predicted: if is_compared { headline.of.over(&headline.to, &all) } else { None },
                judged: if is_compared { headline.judged } else { Shape::Reported(POOR) },
            }
        });
        rows.extend(headlines);
        let claims = self.claims.iter().map(|claim| claim.judge(&all)).collect();
        Ok(Prediction {
            figure: self,
            rows,
            claims,
            picture: self.picture(PREDICTED, curves, self.axes, places),
        })
    }

    fn picture(
        &self,
        source: &'static str,
        curves: Vec<Drawn>,
        axes: [&'static str; 2],
        places: Vec<&'static str>,
    ) -> Picture {
        Picture { title: self.title, curves, source, axes, places }
    }
}

/// Reason why a headline is not compared.
const POOR: &str = "not compared: the rival misses its own numbers";

impl Rivals {
    /// Names of the rivals that miss one of their own judged numbers.
    fn poor(&self, rows: &[Row]) -> Vec<&'static str> {
        let misses = |name: &&&str| {
            rows.iter().any(|row| row.curve.starts_with(**name) && row.is_met() == Some(false))
        };
        self.names.iter().filter(misses).copied().collect()
    }
}

impl Predict {
    /// Returns the predicted points: latency in microseconds over operations per second, or a value for each place.
    fn points(&self, places: usize, operations: u64) -> Result<Vec<Point>, String> {
        match self {
            Predict::Each(value) => {
                let at = |place| Some(Point { x: place as f64, y: value(place)? });
                Ok((0..places).filter_map(at).collect())
            }
            Predict::UnderLoad(load) => {
                let measured = Bed::new(**load, 1)?.curve(operations)?;
                Ok(measured.iter().map(|at| Point { x: at.ops_per_s, y: at.mean_us }).collect())
            }
            Predict::UnderSkew { load, clients, coefficients } => {
                let mut bed = Bed::new(**load, 1)?;
                let mut at = |(place, &skew): (usize, &f64)| {
                    bed.set_skew(skew);
                    let ops_per_s = bed.measure(*clients, operations)?.ops_per_s;
                    // Little's law: no client waits between operations. Operations that have not ended count, too.
                    Ok(Point { x: place as f64, y: f64::from(*clients) / ops_per_s * MILLION })
                };
                coefficients.iter().enumerate().map(&mut at).collect()
            }
            Predict::PeakUnderSkew { load, clients, coefficients } => {
                let mut bed = Bed::new(**load, 1)?;
                let mut at = |(place, &skew): (usize, &f64)| {
                    bed.set_skew(skew);
                    let mut peak: f64 = 0.0;
                    for &clients in *clients {
                        let measured = bed.measure(clients, operations.max(u64::from(clients) * 20))?;
                        peak = peak.max(measured.ops_per_s);
                    }
                    Ok(Point { x: place as f64, y: peak / MILLION })
                };
                coefficients.iter().enumerate().map(&mut at).collect()
            }
            Predict::ByLength { load, clients, lengths, value } => {
                let at = |(place, &value_len): (usize, &usize)| {
                    let bed = Bed::new(Load { value_len, ..**load }, 1)?;
                    Ok(Point { x: place as f64, y: value(&bed.measure(*clients, operations)?) })
                };
                lengths.iter().enumerate().map(at).collect()
            }
            Predict::ByClients { load, clients } => {
                let bed = Bed::new(**load, 1)?;
                let at = |(place, &clients): (usize, &u32)| {
                    let measured = bed.measure(clients, operations.max(u64::from(clients) * 20))?;
                    Ok(Point { x: place as f64, y: measured.ops_per_s / MILLION })
                };
                clients.iter().enumerate().map(at).collect()
            }
            Predict::Found(find) => {
                (0..places).map(|place| Ok(Point { x: place as f64, y: find(place, operations)? })).collect()
            }
            Predict::Points(find) => find(operations),
        }
    }
}

const MILLION: f64 = 1e6;

impl At {
    /// Returns the value at this position of a predicted curve; `None` if the curve does not reach it.
    fn on(self, points: &[Point]) -> Option<f64> {
        match self {
            At::Place(place) => points.iter().find(|point| point.x == place as f64).map(|point| point.y),
            At::Low(_) => points.first().map(|point| point.y),
            At::Throughput(mops) => {
                let x = mops * MILLION;
                let around = points.windows(2).find(|pair| (pair[0].x..=pair[1].x).contains(&x))?;
                let [before, after] = [around[0], around[1]];
                let share = (x - before.x) / (after.x - before.x);
                Some(before.y + share * (after.y - before.y))
            }
            At::Peak => points.iter().map(|point| point.x).reduce(f64::max).map(|x| x / MILLION),
            At::LatencyAtPeak => {
                points.iter().max_by(|one, other| one.x.total_cmp(&other.x)).map(|point| point.y)
            }
        }
    }

    fn name(self, places: &[&'static str]) -> String {
        match self {
            At::Place(place) => places[place].to_owned(),
            At::Low(_) => "low load".to_owned(),
            At::Throughput(mops) => format!("at {mops} M/s"),
            At::Peak => "peak".to_owned(),
            At::LatencyAtPeak => "at the peak".to_owned(),
        }
    }

    fn unit(self, of_places: &'static str) -> &'static str {
        match self {
            At::Place(_) => of_places,
            At::Low(_) | At::Throughput(_) | At::LatencyAtPeak => "us",
            At::Peak => "M/s",
        }
    }
}

impl Published {
    /// Returns the point to draw, if both coordinates are known.
    fn point(&self) -> Option<Point> {
        let x = match self.at {
            At::Place(place) => Some(place as f64),
            At::Low(mops) => mops,
            At::Throughput(mops) => Some(mops),
            At::Peak | At::LatencyAtPeak => None,
        };
        x.map(|x| Point { x, y: self.value })
    }
}

impl Value {
    /// Returns this value divided by another one, if the curves reach both.
    fn over(&self, to: &Value, curves: &[(&'static str, Vec<Point>)]) -> Option<f64> {
        Some(self.on(curves)? / to.on(curves)?)
    }

    /// Name of the curve that has the value, if one has it.
    fn curve(&self) -> Option<&'static str> {
        match self {
            Value::On(name, _) => Some(name),
            Value::Of(_) => None,
        }
    }

    fn on(&self, curves: &[(&'static str, Vec<Point>)]) -> Option<f64> {
        match self {
            Value::On(name, at) => {
                let curve = curves.iter().find(|(curve, _)| curve == name);
                at.on(&curve.expect("a value is on a curve of its own figure").1)
            }
            Value::Of(value) => Some(value()),
        }
    }
}

impl Claim {
    fn judge(&self, curves: &[(&'static str, Vec<Point>)]) -> JudgedClaim {
        let judge = |(of, to, shape): &(Value, Value, Shape)| {
            let ratio = of.over(to, curves)?;
            Some((ratio, shape.holds(ratio) != Some(false)))
        };
        let judged: Option<Vec<(f64, bool)>> = self.ratios.iter().map(judge).collect();
        let judged = judged.unwrap_or_default();
        JudgedClaim {
            what: self.what,
            holds: !judged.is_empty() && judged.iter().all(|(_, holds)| *holds),
            ratios: judged.into_iter().map(|(ratio, _)| ratio).collect(),
        }
    }
}

/// A point of a curve, in the units of its figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Horizontal coordinate.
    pub x: f64,
    /// Vertical coordinate.
    pub y: f64,
}

/// A curve of a picture.
#[derive(Clone, Debug)]
pub struct Drawn {
    /// Name in the legend.
    pub name: &'static str,
    /// The paper's points; empty if the paper has no such curve.
    pub published: Vec<Point>,
    /// Predicted or measured points.
    pub here: Vec<Point>,
}

/// Origin of points that the simulator predicted.
const PREDICTED: &str = "predicted";
/// Origin of points that were measured on a real fabric.
const MEASURED: &str = "measured";

/// A figure that can be drawn.
#[derive(Clone, Debug)]
pub struct Picture {
    /// Title of the figure.
    pub title: &'static str,
    /// The curves.
    pub curves: Vec<Drawn>,
    /// Origin of the points that were not published: `predicted` or `measured`.
    pub source: &'static str,
    /// Labels of the horizontal and the vertical axis.
    pub axes: [&'static str; 2],
    /// Names of the places on the horizontal axis; empty if the axis has numbers.
    pub places: Vec<&'static str>,
}

impl Picture {
    /// Returns every point of every curve as CSV, with a header line.
    pub fn csv(&self) -> String {
        let place = |x: f64| match self.places.get(x as usize) {
            Some(place) => field(place),
            None => x.to_string(),
        };
        let mut lines = format!("curve,source,{},{}\n", field(self.axes[0]), field(self.axes[1]));
        for curve in &self.curves {
            for (source, points) in [("published", &curve.published), (self.source, &curve.here)] {
                for point in points {
                    lines += &format!("{},{source},{},{}\n", field(curve.name), place(point.x), point.y);
                }
            }
        }
        lines
    }
}

/// Quotes a CSV field if necessary (RFC 4180).
fn field(text: &str) -> String {
    if text.contains([',', '"']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.to_owned() }
}

/// Formats each value as a JSON object on a line of its own.
fn json_lines<T: Serialize>(values: impl Iterator<Item = T>) -> String {
    values.map(|value| serde_json::to_string(&value).expect("plain data") + "\n").collect()
}

/// A position on a curve, with its published and its predicted number.
#[derive(Clone, Debug)]
pub struct Row {
    /// Name of the curve.
    pub curve: &'static str,
    /// Name of the position on the curve.
    pub point: String,
    /// Unit of both numbers.
    pub unit: &'static str,
    /// The paper's number; absent if the paper does not have the curve.
    pub published: Option<f64>,
    /// The simulator's number; absent if the predicted curve does not reach this position.
    pub predicted: Option<f64>,
    /// Condition on the ratio of the two numbers.
    pub judged: Shape,
}

impl Row {
    /// Returns the predicted number divided by the published one, if both are known.
    pub fn ratio(&self) -> Option<f64> {
        Some(self.predicted? / self.published?)
    }

    /// Returns whether the condition is met; `None` if there is no condition. A missing number does not meet it.
    pub fn is_met(&self) -> Option<bool> {
        match (self.judged, self.ratio()) {
            (Shape::Reported(_), _) => None,
            (_, None) => Some(false),
            (shape, Some(ratio)) => shape.holds(ratio),
        }
    }
}

/// A claim and the predicted ratios that decide it.
#[derive(Clone, Debug)]
pub struct JudgedClaim {
    /// The claim in words.
    pub what: &'static str,
    /// The ratios; empty if a curve does not reach one of the positions.
    pub ratios: Vec<f64>,
    /// Whether all ratios are known and meet their conditions.
    pub holds: bool,
}

/// The prediction of a figure, compared with the published numbers.
#[derive(Clone)]
pub struct Prediction {
    /// The predicted figure.
    pub figure: &'static Figure,
    /// The published numbers, each with its prediction.
    pub rows: Vec<Row>,
    /// The claims about the curves, each with its verdict.
    pub claims: Vec<JudgedClaim>,
    /// The curves to draw.
    pub picture: Picture,
}

impl Prediction {
    /// Whether all conditions are met and all claims hold.
    pub fn is_met(&self) -> bool {
        self.rows.iter().all(|row| row.is_met() != Some(false)) && self.claims.iter().all(|claim| claim.holds)
    }

    /// Formats a table for people: every published number with its prediction and the error, then the claims.
    pub fn table(&self) -> String {
        let mut table = Table::new(["curve", "point", "published", "predicted", "unit", "miss", "within"]);
        for row in &self.rows {
            let predicted = row.predicted.map_or("none".to_owned(), |predicted| format!("{predicted:.2}"));
            let miss = row.ratio().map_or(String::new(), |ratio| format!("{:+.1} %", 100.0 * (ratio - 1.0)));
            let met = if row.is_met() == Some(true) { "yes" } else { "NO" };
            let within = match row.judged {
                Shape::Within(share) => format!("{met}, {:.0} %", 100.0 * share),
                Shape::Below(most) => format!("{met}, below {most}"),
                Shape::Above(least) | Shape::AtLeast(least) => format!("{met}, above {least}"),
                Shape::Reported(why) => format!("reported: {why}"),
            };
            let published = row.published.map_or("-".to_owned(), |published| format!("{published}"));
            table.push([row.curve, &row.point, &published, &predicted, row.unit, &miss, &within]);
        }
        let claims = self.claims.iter().map(|claim| {
            format!("{}: {}\n", if claim.holds { "holds" } else { "DOES NOT HOLD" }, claim.what)
        });
        format!("{}\n{table}{}", self.figure.title, claims.collect::<String>())
    }

    /// Formats each row as a JSON object on a line of its own, for programs.
    pub fn json(&self) -> String {
        #[derive(Serialize)]
        struct Line<'a> {
            figure: &'a str,
            curve: &'a str,
            point: &'a str,
            unit: &'a str,
            published: Option<f64>,
            predicted: Option<f64>,
            ratio: Option<f64>,
            tolerance: Option<f64>,
            is_met: Option<bool>,
        }
        json_lines(self.rows.iter().map(|row| Line {
            figure: self.figure.name,
            curve: row.curve,
            point: &row.point,
            unit: row.unit,
            published: row.published,
            predicted: row.predicted,
            ratio: row.ratio(),
            tolerance: match row.judged {
                Shape::Within(share) => Some(share),
                _ => None,
            },
            is_met: row.is_met(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_figures_and_of_a_figures_curves_are_unique() {
        for figure in FIGURES {
            assert!(
                std::ptr::eq(Figure::named(figure.name).expect("it is listed"), figure),
                "{}",
                figure.name
            );
            let curves = (figure.curves)();
            for (place, curve) in curves.iter().enumerate() {
                assert!(curves[..place].iter().all(|other| other.name != curve.name), "{}", curve.name);
            }
        }
    }

    #[test]
    fn headlines_and_claims_name_curves_of_their_figure() {
        for figure in FIGURES {
            let curves = (figure.curves)();
            let claimed =
                figure.claims.iter().flat_map(|claim| claim.ratios).flat_map(|(of, to, _)| [of, to]);
            let compared = figure.headlines.iter().flat_map(|headline| [&headline.of, &headline.to]);
            for name in claimed.chain(compared).filter_map(Value::curve) {
                let is_there = curves.iter().any(|curve| curve.name == name);
                assert!(is_there, "{} has no curve '{name}'", figure.name);
            }
        }
    }

    #[test]
    fn values_are_interpolated_and_never_extrapolated() {
        let points = [(1e6, 10.0), (3e6, 20.0), (2.9e6, 30.0)].map(|(x, y)| Point { x, y });
        let at = |at: At| at.on(&points);
        assert_eq!(at(At::Low(None)), Some(10.0));
        assert_eq!(at(At::Throughput(2.0)), Some(15.0));
        assert_eq!(at(At::Throughput(4.0)), None);
        assert_eq!(at(At::Peak), Some(3.0));
        assert_eq!(at(At::LatencyAtPeak), Some(20.0));
        assert_eq!(At::Place(1).on(&[Point { x: 1.0, y: 7.0 }]), Some(7.0));
        assert_eq!(At::Place(2).on(&[Point { x: 1.0, y: 7.0 }]), None);
    }

    /// Two curves without published points, and two headlines, one of them with a number.
    const fn in_words(name: &'static str, rivals: Option<Rivals>) -> Figure {
        Figure {
            name,
            title: "",
            source: "",
            axes: ["x", "y"],
            places: || vec!["left", "right"],
            unit: "us",
            curves: || {
                let curve = |name, scale: f64| Curve {
                    name,
                    predict: Predict::Each(Box::new(move |place| Some(scale * (place + 1) as f64))),
                    published: Vec::new(),
                    unpublished: "not available",
                };
                vec![curve("one", 2.0), curve("other", 3.0)]
            },
            headlines: &[
                Headline {
                    curves: "other / one",
                    point: "right",
                    of: Value::On("other", At::Place(1)),
                    to: Value::On("one", At::Place(1)),
                    published: Some(1.0),
                    judged: Shape::Within(0.25),
                },
                Headline {
                    curves: "one",
                    point: "right / left",
                    of: Value::On("one", At::Place(1)),
                    to: Value::On("one", At::Place(0)),
                    published: None,
                    judged: Shape::Reported("no number"),
                },
            ],
            claims: &[],
            rivals,
            fabrics: OnFabrics::Nothing("words"),
        }
    }

    static IN_WORDS: Figure = in_words("in words", None);

    #[test]
    fn headlines_are_compared_like_points_and_curves_without_points_are_reported() {
        let prediction = IN_WORDS.predict(1_000).expect("nothing is simulated");
        let rows: Vec<_> =
            prediction.rows.iter().map(|row| (row.curve, row.predicted, row.is_met())).collect();
        let reported = [("one", 2.0), ("one", 4.0), ("other", 3.0), ("other", 6.0)];
        let mut expected = reported.map(|(curve, value)| (curve, Some(value), None)).to_vec();
        expected.extend([("other / one", Some(1.5), Some(false)), ("one", Some(2.0), None)]);
        assert_eq!(rows, expected);
        assert!(!prediction.is_met());
        assert!(prediction.table().contains("reported: not available"), "{}", prediction.table());
    }

    /// The same figure, in which `other` is a rival whose own number is 8 and should be 10.
    static RIVALS: Figure = in_words(
        "rivals",
        Some(Rivals {
            names: &["other"],
            numbers: |_operations| {
                Ok(vec![Row {
                    curve: "other",
                    point: "alone".to_owned(),
                    unit: "us",
                    published: Some(10.0),
                    predicted: Some(8.0),
                    judged: Shape::Within(0.1),
                }])
            },
        }),
    );

    #[test]
    fn a_rival_that_misses_its_own_numbers_is_not_compared() {
        let prediction = RIVALS.predict(1_000).expect("nothing is simulated");
        let rows = |curve| prediction.rows.iter().filter(move |row| row.curve == curve);
        assert_eq!(rows("other").map(Row::is_met).next(), Some(Some(false)));
        let compared: Vec<_> = rows("other / one").map(|row| (row.predicted, row.judged)).collect();
        assert_eq!(compared, [(None, Shape::Reported(POOR))]);
        assert_eq!(rows("one").filter(|row| row.predicted == Some(2.0)).count(), 2, "it has no rival");
        assert!(!prediction.is_met());
    }

    #[test]
    fn a_claim_holds_if_all_of_its_ratios_are_known_and_hold() {
        const EQUAL: (Value, Value, Shape) =
            (Value::On("one", At::Peak), Value::Of(|| 2.0), Shape::Within(0.0));
        const LESS: (Value, Value, Shape) =
            (Value::On("one", At::Peak), Value::Of(|| 2.0), Shape::Below(1.0));
        const BEYOND: (Value, Value, Shape) =
            (Value::On("one", At::Throughput(9.0)), Value::Of(|| 2.0), Shape::Above(0.0));
        let curves = [("one", vec![Point { x: 2e6, y: 1.0 }])];
        let judge = |ratios| {
            let JudgedClaim { ratios, holds, .. } = Claim { what: "", ratios }.judge(&curves);
            (ratios, holds)
        };
        assert_eq!(judge(&[EQUAL]), (vec![1.0], true));
        assert_eq!(judge(&[EQUAL, LESS]), (vec![1.0, 1.0], false));
        assert_eq!(judge(&[EQUAL, BEYOND]), (Vec::new(), false));
    }
}
