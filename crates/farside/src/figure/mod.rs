//! The papers' figures as data: what was published, how each curve is predicted, and what is claimed; and what real
//! fabrics have in common with them ([`ratio`]).
//!
//! A figure is one entry of [`FIGURES`], in the file of its paper.
//!
//! Invariant: nothing that was published of an application is an input of a prediction: it is only compared with.
//! Invariant: a point that is not judged says why.

pub mod draw;
pub mod load;
mod prism;
pub mod ratio;
mod synchronization;
pub mod whatif;

use farside_bench::report::Table;
use farside_sim::hardware::Distance;
use farside_sim::micro::MicroOp;
use load::{Bed, Load};
use ratio::Runner;
use serde::Serialize;

/// All figures.
pub static FIGURES: [&Figure; 5] =
    [&prism::FIGURE_1, &prism::FIGURE_2, &prism::FIGURE_3, &prism::FIGURE_4, &synchronization::SECTION_4];

/// A figure of a paper, or the numbers of a section.
pub struct Figure {
    /// Its name in commands and reports.
    pub name: &'static str,
    /// What it shows.
    pub title: &'static str,
    /// The paper, and the place in it.
    pub source: &'static str,
    /// Labels of the horizontal and the vertical axis.
    axes: [&'static str; 2],
    /// Names of the places on the horizontal axis; none if they are million operations a second.
    places: fn() -> Vec<&'static str>,
    /// Unit of the values at places.
    unit: &'static str,
    curves: fn() -> Vec<Curve>,
    claims: &'static [Claim],
    /// What of it can be measured on a real fabric.
    pub fabrics: OnFabrics,
}

/// A curve: how it is predicted, and what was published of it.
struct Curve {
    /// Its name in the legend.
    name: &'static str,
    predict: Predict,
    published: Vec<Published>,
}

/// How a curve is predicted.
enum Predict {
    /// Place by place; nothing where the curve has no point.
    Each(Box<dyn Fn(usize) -> Option<f64>>),
    /// A system with ever more clients: mean latency over throughput.
    UnderLoad(Box<Load>),
}

/// A published number.
#[derive(Clone, Copy)]
struct Published {
    at: At,
    value: f64,
    judged: Shape,
}

/// Where a number is on its curve.
#[derive(Clone, Copy)]
enum At {
    /// At a place of the horizontal axis.
    Place(usize),
    /// Latency with one client; in the paper at that many million operations a second, if it can be read.
    Low(Option<f64>),
    /// Latency at that many million operations a second.
    Throughput(f64),
    /// The most million operations a second.
    Peak,
}

/// Which ratios are as they should be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shape {
    /// As far from 1 as that share, or nearer.
    Within(f64),
    /// Less than this.
    Below(f64),
    /// More than this.
    Above(f64),
    /// This or more.
    AtLeast(f64),
    /// Any, for this reason.
    Reported(&'static str),
}

impl Shape {
    /// Whether a ratio has this shape; nothing if it need not have any.
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

/// Something that the paper's curves show and the predicted ones must, too: every ratio has its shape.
pub struct Claim {
    /// What.
    what: &'static str,
    ratios: &'static [(Value, Value, Shape)],
}

/// A predicted value.
enum Value {
    /// Of the curve of that name.
    On(&'static str, At),
    /// Beside the curves.
    Of(fn() -> f64),
}

/// What of a figure can be measured on a real fabric.
pub enum OnFabrics {
    /// Ops, one at a time, over one op.
    Ops(Ops),
    /// Stores under load, over one of them.
    Stores(Stores),
    /// Nothing: the figure is about this.
    Nothing(&'static str),
}

/// Ops that are measured in turn.
pub struct Ops {
    /// In this order.
    pub ops: &'static [MicroOp],
    /// The op to which the others are compared.
    pub base: MicroOp,
    /// Where the node is, unless the user says.
    pub distances: &'static [Distance],
    curve: &'static str,
    axes: [&'static str; 2],
    point: fn(MicroOp, Distance) -> &'static str,
    /// The published ratio of an op to the base.
    published: fn(Runner, MicroOp, Distance) -> Option<f64>,
}

/// Stores that are measured in turn.
pub struct Stores {
    /// The YCSB workload.
    pub workload: &'static str,
    /// The systems; the others are compared to the last one.
    pub systems: &'static [&'static str],
    /// Where the node is, unless the user says.
    pub distance: Distance,
    axes: [&'static str; 2],
}

impl Figure {
    /// The figure of that name.
    pub fn named(name: &str) -> Option<&'static Figure> {
        FIGURES.into_iter().find(|figure| figure.name == name)
    }

    /// Predicts it, each point under load over that many operations.
    ///
    /// # Errors
    /// A simulated operation failed.
    pub fn predict(&'static self, operations: u64) -> Result<Prediction, String> {
        let places = (self.places)();
        let (mut rows, mut curves, mut all) = (Vec::new(), Vec::new(), Vec::new());
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
                rows.extend([At::Low(None), At::Peak].map(|at| row(at, None, UNPUBLISHED)));
            }
            curves.push(Drawn {
                name: curve.name,
                published: curve.published.iter().filter_map(Published::point).collect(),
                here: points
                    .iter()
                    .map(|&Point { x, y }| Point { x: x / curve.predict.x_unit(), y })
                    .collect(),
            });
            all.push((curve.name, points));
        }
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

impl Predict {
    /// In operations a second and microseconds, or by place.
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
        }
    }

    fn x_unit(&self) -> f64 {
        match self {
            Predict::Each(_) => 1.0,
            Predict::UnderLoad(_) => MILLION,
        }
    }
}

const MILLION: f64 = 1e6;
/// Of a curve that the paper has not, which stands beside its own.
const UNPUBLISHED: Shape = Shape::Reported("not in the paper");

impl At {
    /// The value on a predicted curve, if that gets there.
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
            At::Peak => Some(points.iter().map(|point| point.x).fold(0.0, f64::max) / MILLION),
        }
    }

    fn name(self, places: &[&'static str]) -> String {
        match self {
            At::Place(place) => places[place].to_owned(),
            At::Low(_) => "low load".to_owned(),
            At::Throughput(mops) => format!("at {mops} M/s"),
            At::Peak => "peak".to_owned(),
        }
    }

    fn unit(self, of_places: &'static str) -> &'static str {
        match self {
            At::Place(_) => of_places,
            At::Low(_) | At::Throughput(_) => "us",
            At::Peak => "M/s",
        }
    }
}

impl Published {
    /// Where it is drawn, if both of its coordinates are known.
    fn point(&self) -> Option<Point> {
        let x = match self.at {
            At::Place(place) => Some(place as f64),
            At::Low(mops) => mops,
            At::Throughput(mops) => Some(mops),
            At::Peak => None,
        };
        x.map(|x| Point { x, y: self.value })
    }
}

impl Claim {
    fn judge(&self, curves: &[(&'static str, Vec<Point>)]) -> JudgedClaim {
        let value = |value: &Value| match value {
            Value::On(name, at) => {
                let curve = curves.iter().find(|(curve, _)| curve == name);
                at.on(&curve.expect("a claim is about curves of its figure").1)
            }
            Value::Of(value) => Some(value()),
        };
        let judge = |(of, to, shape): &(Value, Value, Shape)| {
            let ratio = value(of)? / value(to)?;
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
    /// To the right.
    pub x: f64,
    /// Upwards.
    pub y: f64,
}

/// A curve of a picture.
#[derive(Clone, Debug)]
pub struct Drawn {
    /// Its name in the legend.
    pub name: &'static str,
    /// The paper's points; none if it has no such curve.
    pub published: Vec<Point>,
    /// The points that are predicted, or were measured.
    pub here: Vec<Point>,
}

/// Where the numbers of a picture that were not published come from.
const PREDICTED: &str = "predicted";
const MEASURED: &str = "measured";

/// A figure that can be drawn.
#[derive(Clone, Debug)]
pub struct Picture {
    /// What it shows.
    pub title: &'static str,
    /// The curves.
    pub curves: Vec<Drawn>,
    /// Origin of the points that were not published: predicted, or measured.
    pub source: &'static str,
    /// Labels of the horizontal and the vertical axis.
    pub axes: [&'static str; 2],
    /// Names of the places on the horizontal axis; none if they are numbers.
    pub places: Vec<&'static str>,
}

impl Picture {
    /// Every point of every curve, with a heading.
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

/// A field of CSV (RFC 4180).
fn field(text: &str) -> String {
    if text.contains([',', '"']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.to_owned() }
}

/// Values, each as a JSON object on a line of its own.
fn json_lines<T: Serialize>(values: impl Iterator<Item = T>) -> String {
    values.map(|value| serde_json::to_string(&value).expect("plain data") + "\n").collect()
}

/// One published number, and what is predicted for it; or what is predicted of a curve that the paper has not.
#[derive(Clone, Debug)]
pub struct Row {
    /// The curve.
    pub curve: &'static str,
    /// The place on it.
    pub point: String,
    /// The unit of both numbers.
    pub unit: &'static str,
    /// The paper's number; nothing on a curve that it has not.
    pub published: Option<f64>,
    /// The simulator's number; nothing where it does not get there.
    pub predicted: Option<f64>,
    /// How the prediction must compare.
    pub judged: Shape,
}

impl Row {
    /// The prediction over what was published.
    pub fn ratio(&self) -> Option<f64> {
        Some(self.predicted? / self.published?)
    }

    /// Whether it is met; nothing if it need not be.
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
    /// What is claimed.
    pub what: &'static str,
    /// The ratios; none if a curve does not get to where one is taken.
    pub ratios: Vec<f64>,
    /// Whether all of them have their shapes.
    pub holds: bool,
}

/// A predicted figure.
#[derive(Clone)]
pub struct Prediction {
    /// The figure.
    pub figure: &'static Figure,
    /// The published numbers, one by one.
    pub rows: Vec<Row>,
    /// What the curves show together.
    pub claims: Vec<JudgedClaim>,
    /// The curves.
    pub picture: Picture,
}

impl Prediction {
    /// Whether all points that must be are met, and all claims hold.
    pub fn is_met(&self) -> bool {
        self.rows.iter().all(|row| row.is_met() != Some(false)) && self.claims.iter().all(|claim| claim.holds)
    }

    /// For people: every number with its miss, then the claims.
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

    /// For programs: every number as a JSON object on a line of its own.
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
    fn figures_and_their_curves_have_names_of_their_own() {
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
    fn a_value_between_two_points_is_taken_from_the_line_between_them_and_none_is_beyond() {
        let points = [(1e6, 10.0), (3e6, 20.0), (2.9e6, 30.0)].map(|(x, y)| Point { x, y });
        let at = |at: At| at.on(&points);
        assert_eq!(at(At::Low(None)), Some(10.0));
        assert_eq!(at(At::Throughput(2.0)), Some(15.0));
        assert_eq!(at(At::Throughput(4.0)), None);
        assert_eq!(at(At::Peak), Some(3.0));
        assert_eq!(At::Place(1).on(&[Point { x: 1.0, y: 7.0 }]), Some(7.0));
        assert_eq!(At::Place(2).on(&[Point { x: 1.0, y: 7.0 }]), None);
    }

    #[test]
    fn a_claim_holds_if_all_of_its_ratios_do_and_not_where_one_is_missing() {
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
