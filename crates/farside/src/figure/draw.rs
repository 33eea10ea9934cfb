//! Draws a figure: published points as crosses on dashed lines, predicted or measured points as dots on solid lines.

use super::{Picture, Point};
use kuva::plot::scatter::MarkerShape;
use kuva::prelude::{Layout, LinePlot, Plot, ScatterPlot, render_to_svg};

/// Colours of curves. Each curve also has a legend, for readers who cannot tell the colours apart.
const COLOURS: [&str; 5] = ["#1b6ca8", "#c2571a", "#2e7d32", "#7b3fa0", "#6b6b6b"];

/// Renders the picture as SVG.
pub fn svg(picture: &Picture) -> String {
    let has_places = !picture.places.is_empty();
    let mut plots: Vec<Plot> = Vec::new();
    for (curve, colour) in picture.curves.iter().zip(COLOURS.into_iter().cycle()) {
        let published = data(&curve.published, has_places);
        let here = data(&curve.here, has_places);
        let legend = |source: &str| format!("{}, {source}", curve.name);
        if !published.is_empty() {
            if !has_places {
                plots.push(
                    LinePlot::new().with_data(published.clone()).with_color(colour).with_dashed().into(),
                );
            }
            let crosses = ScatterPlot::new().with_marker(MarkerShape::Cross).with_size(6.0);
            let crosses = crosses.with_data(published).with_color(colour);
            plots.push(crosses.with_legend(legend("published")).into());
        }
        if !has_places {
            plots.push(LinePlot::new().with_data(here.clone()).with_color(colour).into());
        }
        let dots = ScatterPlot::new().with_data(here).with_color(colour);
        plots.push(dots.with_legend(legend(picture.source)).into());
    }
    let [right, up] = picture.axes;
    let layout = Layout::auto_from_plots(&plots).with_title(picture.title);
    let mut layout = layout.with_x_label(right).with_y_label(up).with_y_axis_min(0.0);
    if has_places {
        let places = picture.places.iter().map(|place| (*place).to_owned()).collect();
        layout = layout.with_x_categories(places);
    } else {
        layout = layout.with_x_axis_min(0.0);
    }
    render_to_svg(plots, layout)
}

/// Returns the coordinates of points. The plotting library numbers the places of an axis from 1; our indexes start at
/// 0.
fn data(points: &[Point], has_places: bool) -> Vec<(f64, f64)> {
    points.iter().map(|point| (point.x + f64::from(u8::from(has_places)), point.y)).collect()
}
