//! The figures of key-value stores under load: latency over throughput, as clients are added.

use super::load::{Bed, Load, Measured};
use super::published::KvCurve;
use super::{Claim, Curve, Figure, Judged, PREDICTED, Picture, Point, Prediction, Row};
use farside_sim::hardware::{INPUTS, Platform, Testbed};

/// Bytes of a value in those figures.
const VALUE_LEN: usize = 512;
const SEED: u64 = 1;
/// How far low-load latency and peak of a curve may be.
const WITHIN: f64 = 0.15;

pub(super) fn predict(
    figure: Figure,
    reads: f64,
    published: &[KvCurve; 3],
    operations: u64,
) -> Result<Prediction, String> {
    let mut curves = Vec::new();
    let mut rows = Vec::new();
    for of in published {
        let load = Load {
            system: of.system,
            platform: of.platform,
            testbed: Testbed::PRISM_APPLICATIONS,
            inputs: INPUTS,
            reads,
            value_len: VALUE_LEN,
        };
        let measured = Bed::new(load, SEED)?.curve(operations)?;
        rows.extend(rows_of(figure, of, &measured));
        let known = of.low.0.map(|x| Point { x, y: of.low.1 });
        let points = of.points.iter().map(|&(x, y)| Point { x, y });
        curves.push(Curve {
            name: of.name,
            published: known.into_iter().chain(points).collect(),
            here: measured.iter().map(|at| Point { x: at.ops_per_s / 1e6, y: at.mean_us }).collect(),
        });
    }
    let claims = claims(figure, &rows);
    let axes = ["million operations a second", "mean latency, us"];
    Ok(Prediction { figure, rows, claims, picture: Picture::of(figure, PREDICTED, curves, axes, Vec::new()) })
}

const LOW_LOAD: &str = "low load";
const PEAK: &str = "peak";

fn rows_of(figure: Figure, of: &KvCurve, measured: &[Measured]) -> Vec<Row> {
    let row = |point: String, unit, published, predicted, judged| Row {
        curve: of.name,
        point,
        unit,
        published,
        predicted,
        judged,
    };
    let low_load = match (figure, of.platform) {
        (Figure::Prism4, Platform::Rdma) => {
            Judged::Reported("the paper's text has 8 us for a GET and 6 for a PUT: 7")
        }
        _ => Judged::Within(WITHIN),
    };
    let mut rows = vec![row(LOW_LOAD.to_owned(), "us", of.low.1, Some(measured[0].mean_us), low_load)];
    for &(mops, published) in of.points {
        let judged = Judged::Reported("no time here has a spread, so little queues below the peak");
        rows.push(row(format!("at {mops} M/s"), "us", published, latency_at(measured, mops), judged));
    }
    rows.push(row(PEAK.to_owned(), "M/s", of.peak, Some(peak(measured)), Judged::Within(WITHIN)));
    rows
}

fn peak(measured: &[Measured]) -> f64 {
    measured.iter().map(|at| at.ops_per_s).fold(0.0, f64::max) / 1e6
}

/// How long operations take where there are so many million a second; nothing beyond the peak.
fn latency_at(measured: &[Measured], mops: f64) -> Option<f64> {
    let around =
        measured.windows(2).find(|pair| (pair[0].ops_per_s..=pair[1].ops_per_s).contains(&(mops * 1e6)))?;
    let [before, after] = [around[0], around[1]];
    let share = (mops * 1e6 - before.ops_per_s) / (after.ops_per_s - before.ops_per_s);
    Some(before.mean_us + share * (after.mean_us - before.mean_us))
}

/// The orders of the curves that the paper shows, and tells.
fn claims(figure: Figure, rows: &[Row]) -> Vec<Claim> {
    let of = |point: &str| {
        let mut all = rows.iter().filter(|row| row.point == point).filter_map(|row| row.predicted);
        std::array::from_fn::<f64, 3, _>(|_| all.next().expect("each curve has both points"))
    };
    let ([prism, hw, sw], [prism_peak, hw_peak, sw_peak]) = (of(LOW_LOAD), of(PEAK));
    match figure {
        Figure::Prism3 => vec![
            Claim {
                what: "at low load PRISM-KV is faster than Pilaf (HW), and that than Pilaf (SW)",
                holds: prism < hw && hw < sw,
            },
            Claim {
                what: "PRISM-KV's peak is higher than both of Pilaf",
                holds: prism_peak > 1.1 * hw_peak && prism_peak > 1.1 * sw_peak,
            },
        ],
        _ => vec![
            Claim {
                what: "at low load Pilaf (HW) is faster than PRISM-KV, and that than Pilaf (SW)",
                holds: hw < prism && prism < sw,
            },
            Claim {
                what: "the peaks of PRISM-KV and Pilaf (HW) are higher than that of Pilaf (SW)",
                holds: prism_peak > 1.05 * sw_peak && hw_peak > 1.05 * sw_peak,
            },
            Claim {
                what: "the peaks of PRISM-KV and Pilaf (HW) are within 15 % of each other",
                holds: (prism_peak / hw_peak - 1.0).abs() <= WITHIN,
            },
        ],
    }
}
