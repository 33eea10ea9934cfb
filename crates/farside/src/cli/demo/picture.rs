//! Draws figures as SVG inside a page. The figures use the page's colours, and shrink with the page.
//!
//! Invariant: no information depends on colour alone: every curve has its own marker, and every bar a name.

use kuva::plot::LegendPosition;
use kuva::plot::scatter::MarkerShape;
use kuva::prelude::{
    BarPlot, Layout, LinePlot, Plot, ReferenceLine, ScatterPlot, Theme, TickFormat, render_to_svg,
};
use std::sync::Arc;

/// A curve and its name.
pub(super) struct Curve {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
}

/// Label and scale of an axis.
pub(super) struct Axis {
    pub(super) label: &'static str,
    pub(super) scale: Scale,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Scale {
    /// Linear scale that starts at 0.
    Linear,
    Log,
    /// Scale for percentiles, spaced by their number of nines, as [`nines`] computes it.
    Percentiles,
}

/// A vertical line with a label.
pub(super) struct Mark {
    pub(super) at: f64,
    pub(super) text: &'static str,
}

/// Colours of curves and bars: variables that the page's style sheet defines for light and dark mode.
const COLOURS: [&str; 6] = ["var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)", "var(--c6)"];
const MARKERS: [MarkerShape; 6] = [
    MarkerShape::Circle,
    MarkerShape::Square,
    MarkerShape::Triangle,
    MarkerShape::Diamond,
    MarkerShape::TriangleDown,
    MarkerShape::Star,
];
const WIDTH: f64 = 500.0;
/// Height of a figure, as a multiple of its highest point, so that the labels of marks fit above the curves.
const HEADROOM: f64 = 1.2;
/// Width by which the last tick's label extends beyond the figure, in pixels.
const LAST_LABEL: f64 = 20.0;

/// Returns the position of a percentile on an axis of [`Scale::Percentiles`]: 1 for 90 %, 2 for 99 %.
pub(super) fn nines(percent: f64) -> f64 {
    -(1.0 - percent / 100.0).log10()
}

/// Draws curves with a marker at each point, and `marks` as vertical lines.
pub(super) fn curves(curves: &[Curve], [right, up]: [Axis; 2], marks: &[Mark], description: &str) -> String {
    let mut plots: Vec<Plot> = Vec::new();
    let looks = COLOURS.into_iter().zip(MARKERS).cycle();
    let drawn = curves.iter().zip(looks).filter(|(curve, _)| !curve.points.is_empty());
    for (curve, (colour, marker)) in drawn {
        let line = LinePlot::new().with_data(curve.points.clone()).with_color(colour);
        plots.push(line.with_stroke_width(2.0).into());
        let dots = ScatterPlot::new().with_data(curve.points.clone()).with_color(colour);
        let dots = dots.with_marker(marker).with_size(5.0);
        plots.push(if curves.len() > 1 { dots.with_legend(&*curve.name).into() } else { dots.into() });
    }
    let mut layout = looks_of(Layout::auto_from_plots(&plots)).with_width(WIDTH).with_height(360.0);
    layout = layout.with_x_label(right.label).with_y_label(up.label);
    layout = match right.scale {
        Scale::Linear => layout.with_x_axis_min(0.0),
        Scale::Log => layout.with_log_x(),
        Scale::Percentiles => layout.with_x_axis_min(0.0).with_x_axis_max(3.05).with_x_tick_step(1.0),
    };
    layout = match up.scale {
        Scale::Log => layout.with_log_y(),
        _ => {
            let highest = curves.iter().flat_map(|curve| &curve.points).map(|&(_, y)| y).fold(0.0, f64::max);
            layout.with_y_axis_min(0.0).with_y_axis_max(highest * HEADROOM)
        }
    };
    layout =
        layout.with_x_tick_format(ticks(right.scale)).with_y_tick_format(TickFormat::Custom(Arc::new(short)));
    for mark in marks {
        layout = layout.with_reference_line(
            ReferenceLine::vertical(mark.at).with_color("var(--ink)").with_label(mark.text),
        );
    }
    if curves.len() > 1 {
        layout = layout.with_legend_position(LegendPosition::OutsideBottomColumns).with_legend_box(false);
    }
    framed(render_to_svg(plots, layout), description)
}

/// Draws horizontal bars in groups. A group has a name and one value for each of `series`.
pub(super) fn bars(
    places: &[(String, Vec<f64>)],
    series: &[&str],
    label: &'static str,
    is_stacked: bool,
    description: &str,
) -> String {
    let mut plot = BarPlot::new().with_horizontal(true).with_width(0.75);
    // The order is reversed, because the library draws the first group at the bottom.
    for (place, values) in places.iter().rev() {
        let in_order: Vec<(f64, &str)> = values.iter().copied().zip(COLOURS).collect();
        plot = plot.with_group(place.clone(), in_order);
    }
    if series.len() > 1 {
        plot = plot.with_legend(series.to_vec());
    }
    if is_stacked {
        plot = plot.with_stacked();
    }
    let per_place = if is_stacked { 1 } else { series.len() };
    let height = 90.0 + 15.0 * (places.len() * (per_place + 1)) as f64;
    let plots: Vec<Plot> = vec![plot.into()];
    let mut layout = looks_of(Layout::auto_from_plots(&plots)).with_width(WIDTH).with_height(height);
    layout = layout.with_x_label(label).with_x_axis_min(0.0).with_x_tick_format(ticks(Scale::Linear));
    if series.len() > 1 {
        layout = layout.with_legend_position(LegendPosition::OutsideBottomColumns).with_legend_box(false);
    }
    framed(render_to_svg(plots, layout), description)
}

fn looks_of(layout: Layout) -> Layout {
    let ink = || "var(--ink)".to_owned();
    let theme = Theme {
        background: "none".into(),
        axis_color: ink(),
        grid_color: "var(--grid)".into(),
        tick_color: ink(),
        text_color: ink(),
        legend_bg: "none".into(),
        legend_border: "none".into(),
        ..Theme::light()
    };
    layout
        .with_theme(theme)
        .with_font_family("system-ui, sans-serif")
        .with_label_size(14)
        .with_tick_size(13)
        .with_body_size(14)
}

fn ticks(scale: Scale) -> TickFormat {
    TickFormat::Custom(Arc::new(move |at| match scale {
        Scale::Percentiles => percentile(at),
        // On the right, the labels 1, 2 and 5 of a decade would overlap. So the label 2 is omitted.
        Scale::Log if short(at).starts_with('2') => String::new(),
        Scale::Linear | Scale::Log => short(at),
    }))
}

fn percentile(at: f64) -> String {
    match at.round() as i64 {
        0 => "0".into(),
        1 => "p90".into(),
        2 => "p99".into(),
        _ => "p99.9".into(),
    }
}

/// Formats a number as a tick's label: `0.5`, `20`, `300 k`, `1.5 M`.
fn short(number: f64) -> String {
    let (scaled, unit) = match number.abs() {
        large if large >= 1e6 => (number / 1e6, " M"),
        large if large >= 1e3 => (number / 1e3, " k"),
        _ => (number, ""),
    };
    let rounded = format!("{scaled:.3}");
    let digits = rounded.trim_end_matches('0').trim_end_matches('.');
    format!("{digits}{unit}")
}

/// Makes the SVG fit into the page:
/// - Replaces its fixed size by a view box, so that it shrinks with the page.
/// - Adds a label for screen readers.
/// - Removes the namespace, which HTML does not need.
fn framed(svg: String, description: &str) -> String {
    let size = |name: &str| {
        let value = svg.split_once(&format!(" {name}=\""))?.1;
        value.split_once('"').map(|(value, _)| value)
    };
    let [width, height] = ["width", "height"].map(|name| size(name).expect("a figure has a size"));
    let width: f64 = width.parse().expect("a width is a number");
    let inside = svg.split_once('>').expect("a figure has an opening").1;
    format!(
        "<svg viewBox=\"0 0 {} {height}\" role=\"img\" aria-label=\"{}\" font-family=\"system-ui, sans-serif\" \
         fill=\"var(--ink)\">{inside}",
        width + LAST_LABEL,
        super::page::escaped(description)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let reported = [0.0, 0.05, 0.5, 20.0, 999.0, 1000.0, 300_000.0, 1_500_000.0, 10_000_000.0].map(short);
        assert_eq!(reported, ["0", "0.05", "0.5", "20", "999", "1 k", "300 k", "1.5 M", "10 M"]);
    }

    #[test]
    fn percentiles_are_spaced_by_their_nines() {
        for (percent, at) in [(0.0, 0.0), (90.0, 1.0), (99.0, 2.0), (99.9, 3.0)] {
            assert!((nines(percent) - at).abs() < 1e-9, "{percent}");
        }
        assert_eq!([0.0, 1.0, 2.0, 3.0].map(percentile), ["0", "p90", "p99", "p99.9"]);
    }

    #[test]
    fn a_figure_has_a_view_box_a_label_and_the_pages_colours() {
        let curve = |name: &str| Curve { name: name.into(), points: vec![(1.0, 2.0), (10.0, 30.0)] };
        let axis = |label| Axis { label, scale: Scale::Log };
        let drawn = curves(&[curve("one"), curve("two")], [axis("right"), axis("up")], &[], "a \"b\"");
        assert!(drawn.starts_with("<svg viewBox=\"0 0 ") && drawn.ends_with("</svg>"), "{drawn}");
        for part in ["aria-label=\"a &quot;b&quot;\"", "var(--c1)", "var(--c2)", ">one<", ">two<", ">right<"]
        {
            assert!(drawn.contains(part), "{part}: {drawn}");
        }
        let bars = bars(&[("shm".into(), vec![1.0, 2.0])], &["client", "node"], "seconds", false, "bars");
        for part in [">shm<", ">client<", ">node<", ">seconds<", "var(--c2)"] {
            assert!(bars.contains(part), "{part}: {bars}");
        }
        for drawn in [drawn, bars] {
            assert!(
                !drawn.contains("http") && !drawn.contains("white") && !drawn.contains("black"),
                "{drawn}"
            );
        }
    }
}
