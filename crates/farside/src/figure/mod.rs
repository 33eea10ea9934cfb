//! The papers' figures as the simulator predicts them, beside what was published; and what real fabrics have in common
//! with them ([`ratio`]).
//!
//! Invariant: nothing that was published of an application is an input of a prediction: `published` is only compared
//! with. Invariant: a point that is not judged says why.

pub mod draw;
mod kv;
pub mod load;
mod micro;
mod published;
pub mod ratio;
pub mod whatif;

use farside_bench::report::Table;
use serde::Serialize;

/// A figure, or a section's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figure {
    /// PRISM (SOSP 2021), figure 1: how long each op takes. What the model is calibrated on.
    Prism1,
    /// PRISM, figure 2: an indirect READ over networks.
    Prism2,
    /// PRISM, figure 3: key-value stores that are read.
    Prism3,
    /// PRISM, figure 4: key-value stores that are read and written.
    Prism4,
    /// Synchronization using one-sided RDMA (SIGMOD 2023), section 4: atomics. What the model is calibrated on.
    Synchronization4,
}

impl Figure {
    /// All of them.
    pub const ALL: [Figure; 5] =
        [Figure::Prism1, Figure::Prism2, Figure::Prism3, Figure::Prism4, Figure::Synchronization4];

    /// As commands and reports name it.
    pub const fn name(self) -> &'static str {
        match self {
            Figure::Prism1 => "prism-1",
            Figure::Prism2 => "prism-2",
            Figure::Prism3 => "prism-3",
            Figure::Prism4 => "prism-4",
            Figure::Synchronization4 => "synchronization-4",
        }
    }

    /// What it shows.
    pub const fn title(self) -> &'static str {
        match self {
            Figure::Prism1 => "PRISM, figure 1: latency of an op, 512 bytes, one cable",
            Figure::Prism2 => "PRISM, figure 2: latency of an indirect READ, 512 bytes",
            Figure::Prism3 => "PRISM, figure 3: 100 % reads, 512 bytes, uniform",
            Figure::Prism4 => "PRISM, figure 4: 50 % reads, 512 bytes, uniform",
            Figure::Synchronization4 => "Synchronization, section 4: atomics on one NIC",
        }
    }

    /// Predicts it, each point under load over so many operations.
    ///
    /// # Errors
    /// A simulated operation failed.
    pub fn predict(self, operations: u64) -> Result<Prediction, String> {
        match self {
            Figure::Prism1 => Ok(micro::figure_1()),
            Figure::Prism2 => Ok(micro::figure_2()),
            Figure::Prism3 => kv::predict(self, 1.0, &published::FIGURE_3, operations),
            Figure::Prism4 => kv::predict(self, 0.5, &published::FIGURE_4, operations),
            Figure::Synchronization4 => Ok(micro::section_4()),
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

/// A curve, as it was published and as it is here.
#[derive(Clone, Debug)]
pub struct Curve {
    /// Its name in the legend.
    pub name: &'static str,
    /// What the paper has; nothing where that has no such curve.
    pub published: Vec<Point>,
    /// What is predicted, or was measured.
    pub here: Vec<Point>,
}

/// Where the numbers of a picture that were not published come from.
const PREDICTED: &str = "predicted";
const MEASURED: &str = "measured";

/// What can be drawn of a figure.
#[derive(Clone, Debug)]
pub struct Picture {
    /// What it shows.
    pub title: &'static str,
    /// The curves.
    pub curves: Vec<Curve>,
    /// What curves are that were not published: predicted, or measured.
    pub source: &'static str,
    /// What stands to the right, and upwards.
    pub axes: [&'static str; 2],
    /// What places on the axis to the right are called; nothing if they are numbers.
    pub places: Vec<&'static str>,
}

impl Picture {
    fn of(
        figure: Figure,
        source: &'static str,
        curves: Vec<Curve>,
        axes: [&'static str; 2],
        places: Vec<&'static str>,
    ) -> Picture {
        Picture { title: figure.title(), curves, source, axes, places }
    }

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

/// Whether a point must be met.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Judged {
    /// To that share.
    Within(f64),
    /// It need not, for this reason.
    Reported(&'static str),
}

/// One published number, and what is predicted for it.
#[derive(Clone, Debug)]
pub struct Row {
    /// Of which curve.
    pub curve: &'static str,
    /// Where on it.
    pub point: String,
    /// In what.
    pub unit: &'static str,
    /// By the paper.
    pub published: f64,
    /// By the simulator; nothing where it does not get there.
    pub predicted: Option<f64>,
    /// Whether it must be met.
    pub judged: Judged,
}

impl Row {
    /// What is predicted to what was published.
    pub fn ratio(&self) -> Option<f64> {
        self.predicted.map(|predicted| predicted / self.published)
    }

    /// Whether it is met; nothing if it need not be.
    pub fn is_met(&self) -> Option<bool> {
        match self.judged {
            Judged::Within(share) => {
                Some(self.ratio().is_some_and(|ratio| (ratio - 1.0).abs() <= share + 1e-9))
            }
            Judged::Reported(_) => None,
        }
    }
}

/// Something that the paper's curves show and the predicted ones must, too.
#[derive(Clone, Debug)]
pub struct Claim {
    /// What.
    pub what: &'static str,
    /// Whether they do.
    pub holds: bool,
}

/// What is predicted of a figure.
#[derive(Clone, Debug)]
pub struct Prediction {
    /// Which.
    pub figure: Figure,
    /// The published numbers, one by one.
    pub rows: Vec<Row>,
    /// What curves show together.
    pub claims: Vec<Claim>,
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
            let within = match (row.judged, row.is_met()) {
                (Judged::Within(share), Some(true)) => format!("yes, {:.0} %", 100.0 * share),
                (Judged::Within(share), _) => format!("NO, {:.0} %", 100.0 * share),
                (Judged::Reported(why), _) => format!("reported: {why}"),
            };
            let published = format!("{}", row.published);
            table.push([row.curve, &row.point, &published, &predicted, row.unit, &miss, &within]);
        }
        let claims = self.claims.iter().map(|claim| {
            format!("{}: {}\n", if claim.holds { "holds" } else { "DOES NOT HOLD" }, claim.what)
        });
        format!("{}\n{table}{}", self.figure.title(), claims.collect::<String>())
    }

    /// For programs: every published number as a JSON object on a line of its own.
    pub fn json(&self) -> String {
        #[derive(Serialize)]
        struct Line<'a> {
            figure: &'a str,
            curve: &'a str,
            point: &'a str,
            unit: &'a str,
            published: f64,
            predicted: Option<f64>,
            ratio: Option<f64>,
            tolerance: Option<f64>,
            is_met: Option<bool>,
        }
        let lines = self.rows.iter().map(|row| {
            let line = Line {
                figure: self.figure.name(),
                curve: row.curve,
                point: &row.point,
                unit: row.unit,
                published: row.published,
                predicted: row.predicted,
                ratio: row.ratio(),
                tolerance: match row.judged {
                    Judged::Within(share) => Some(share),
                    Judged::Reported(_) => None,
                },
                is_met: row.is_met(),
            };
            serde_json::to_string(&line).expect("plain data") + "\n"
        });
        lines.collect()
    }
}
