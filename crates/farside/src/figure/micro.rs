//! The figures of one op at a time, and of atomics on one NIC.

use super::{Claim, Curve, Figure, Judged, PREDICTED, Picture, Point, Prediction, Row};
use farside_sim::hardware::{Distance, Platform};
use farside_sim::micro::{FIGURE_1, FIGURE_2, MicroOp, SECTION_4, Workers, latency, mverbs};

const LATENCY: &str = "latency, us";

fn micros(op: MicroOp, platform: Platform, distance: Distance) -> Option<f64> {
    latency(op, platform, distance).map(|ns| ns as f64 / 1e3)
}

pub(super) fn figure_1() -> Prediction {
    let (mut rows, mut curves) = (Vec::new(), Vec::new());
    for (index, platform) in Platform::ALL.into_iter().enumerate() {
        let mut curve = Curve { name: platform.name(), published: Vec::new(), here: Vec::new() };
        for (place, (op, bars)) in FIGURE_1.into_iter().enumerate() {
            let Some(published) = bars[index] else { continue };
            let predicted = micros(op, platform, Distance::Direct);
            curve.published.push(Point { x: place as f64, y: published });
            curve.here.extend(predicted.map(|y| Point { x: place as f64, y }));
            rows.push(Row {
                curve: platform.name(),
                point: op.name().to_owned(),
                unit: "us",
                published,
                predicted,
                judged: Judged::Within(0.05),
            });
        }
        curves.push(curve);
    }
    let places = FIGURE_1.into_iter().map(|(op, _)| op.name()).collect();
    let picture = Picture::of(Figure::Prism1, PREDICTED, curves, ["op", LATENCY], places);
    Prediction { figure: Figure::Prism1, rows, claims: Vec::new(), picture }
}

pub(super) fn figure_2() -> Prediction {
    let (mut rows, mut curves) = (Vec::new(), Vec::new());
    for (platform, op, points) in FIGURE_2 {
        let name = if op == MicroOp::TwoReads { "rdma, 2 READs" } else { platform.name() };
        let judged = match platform {
            Platform::Rdma | Platform::PrismSw => Judged::Within(0.10),
            Platform::PrismHw => Judged::Reported("as if it took 2.5 us, where figure 1 has 3.1"),
            Platform::BlueField => Judged::Reported("as if it took 11.8 us, where figure 1 has 14.9"),
        };
        let mut curve = Curve { name, published: Vec::new(), here: Vec::new() };
        for (place, distance) in Distance::ALL.into_iter().skip(1).enumerate() {
            let predicted = micros(op, platform, distance);
            curve.published.push(Point { x: place as f64, y: points[place] });
            curve.here.extend(predicted.map(|y| Point { x: place as f64, y }));
            rows.push(Row {
                curve: name,
                point: distance.name().to_owned(),
                unit: "us",
                published: points[place],
                predicted,
                judged,
            });
        }
        curves.push(curve);
    }
    let places = Distance::ALL.into_iter().skip(1).map(Distance::name).collect();
    let picture = Picture::of(Figure::Prism2, PREDICTED, curves, ["network", LATENCY], places);
    Prediction { figure: Figure::Prism2, rows, claims: Vec::new(), picture }
}

pub(super) fn section_4() -> Prediction {
    let mut curve = Curve { name: "verbs", published: Vec::new(), here: Vec::new() };
    let rows = SECTION_4.into_iter().enumerate().map(|(place, (what, workers, published))| {
        let predicted = mverbs(workers);
        curve.published.push(Point { x: place as f64, y: published });
        curve.here.push(Point { x: place as f64, y: predicted });
        Row {
            curve: "verbs",
            point: what.to_owned(),
            unit: "M/s",
            published,
            predicted: Some(predicted),
            judged: Judged::Within(0.25),
        }
    });
    let rows = rows.collect();
    let [padded, unpadded] = [4_096 + 8, 4_096].map(|stride| mverbs(Workers::cas(128, stride)));
    let contended = [4, 8, 16].map(|workers| mverbs(Workers::cas(workers, 0)));
    let own = [128, 512].map(|workers| mverbs(Workers::cas(workers, 64)));
    let claims = vec![
        Claim { what: "8 bytes of padding on 4 KiB are worth ten times", holds: padded >= 10.0 * unpadded },
        Claim {
            what: "one word serves 8 workers and not more",
            holds: contended[0] < 0.9 * contended[1] && contended[2] < 1.1 * contended[1],
        },
        Claim { what: "512 workers are slower than 128", holds: own[1] < own[0] },
    ];
    let places = SECTION_4.into_iter().map(|(what, ..)| what).collect();
    let axes = ["verbs", "million a second"];
    let picture = Picture::of(Figure::Synchronization4, PREDICTED, vec![curve], axes, places);
    Prediction { figure: Figure::Synchronization4, rows, claims, picture }
}
