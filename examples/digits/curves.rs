//! Loss and accuracy over the epochs, as pictures.

use std::error::Error;
use std::path::{Path, PathBuf};

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};

use crate::case::Epoch;

const SIZE: (u32, u32) = (1000, 420);
const FONT: &str = "sans-serif";

/// Writes `curves.svg` and `curves.png` into a folder, which is made if needed; returns their paths.
pub fn draw(history: &[Epoch], folder: &Path) -> Result<[PathBuf; 2], Box<dyn Error>> {
    // A font of our own, so that text doesn't depend on what the system has.
    register_font(FONT, FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT).map_err(|_| "the font can't be read")?;
    std::fs::create_dir_all(folder)?;
    let paths = [folder.join("curves.svg"), folder.join("curves.png")];
    both(&SVGBackend::new(&paths[0], SIZE).into_drawing_area(), history)?;
    both(&BitMapBackend::new(&paths[1], SIZE).into_drawing_area(), history)?;
    Ok(paths)
}

fn both<B: DrawingBackend>(area: &DrawingArea<B, Shift>, history: &[Epoch]) -> Result<(), Box<dyn Error>>
where
    B::ErrorType: 'static,
{
    area.fill(&WHITE)?;
    let (left, right) = area.split_horizontally(SIZE.0 / 2);
    curve(
        &left,
        "training loss",
        &BLUE,
        history.iter().map(|epoch| epoch.train_loss).collect(),
    )?;
    curve(
        &right,
        "test accuracy, %",
        &RED,
        history.iter().map(|epoch| 100.0 * epoch.test_accuracy).collect(),
    )?;
    area.present()?;
    Ok(())
}

fn curve<B: DrawingBackend>(area: &DrawingArea<B, Shift>, title: &str, color: &RGBColor, values: Vec<f64>) -> Result<(), Box<dyn Error>>
where
    B::ErrorType: 'static,
{
    let (low, high) = values
        .iter()
        .filter(|x| x.is_finite())
        .fold((f64::MAX, f64::MIN), |(low, high), &x| (low.min(x), high.max(x)));
    let (low, high) = if low <= high { (low, high) } else { (0.0, 1.0) };
    let margin = if high > low { 0.05 * (high - low) } else { 0.5 };
    let mut chart = ChartBuilder::on(area)
        .caption(title, (FONT, 22))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(1.0..values.len().max(2) as f64, low - margin..high + margin)?;
    let number = |x: &f64| format!("{}", (x * 1000.0).round() / 1000.0);
    chart
        .configure_mesh()
        .x_desc("epoch")
        .x_label_formatter(&number)
        .y_label_formatter(&number)
        .label_style((FONT, 15))
        .axis_desc_style((FONT, 16))
        .light_line_style(WHITE)
        .draw()?;
    chart.draw_series(LineSeries::new((1..).map(f64::from).zip(values), color.stroke_width(2)))?;
    Ok(())
}
