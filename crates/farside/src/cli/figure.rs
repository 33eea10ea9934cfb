//! `figure`: reproduces a paper's figure in one of two ways:
//! - The simulator predicts the figure, and the output lists its numbers next to the published ones.
//! - A real fabric is measured, and the measured ratios are compared with the published ratios.

mod measure;

use super::bench::FabricArg;
use super::{Done, Failure, files};
use clap::ValueEnum;
use farside::figure::{FIGURES, Figure as PaperFigure, OnFabrics, Picture, draw};
use farside_fabrics::executor::TASKS_MAX;
use farside_sim::hardware::Distance;
use measure::Measure;
use std::path::PathBuf;

/// Predict a paper's figure from micro-benchmarks alone, or measure it on a fabric, and compare it with the paper
#[derive(clap::Args)]
pub(super) struct Figure {
    #[arg(value_name = "NAME", value_parser = named, help = listed(|_| true, "or"))]
    which: &'static PaperFigure,
    /// sim predicts the figure; local, shm, udp, tcp, tls or ring start a node and measure it over that fabric, where
    /// only ratios are compared
    #[arg(long, value_name = "NAME", default_value = SIM, value_parser = fabric)]
    fabric: Source,
    /// Simulated operations per point under load [default: 20000]
    #[arg(long, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u64).range(1_000..=10_000_000))]
    operations: Option<u64>,
    /// Added network distance to the measured node: direct, rack, cluster or data-centre [default: the figure's]
    #[arg(long, value_name = "NAME", value_parser = distance)]
    distance: Option<Distance>,
    /// Rounds of a measurement; each compared system or op is measured once per round [default: 40]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: Option<u32>,
    /// Maximum number of clients of a measurement under load, up to 64 [default: 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=TASKS_MAX as i64))]
    clients: Option<u32>,
    /// Records of each store in a measurement under load [default: 100000, or 1000 for chequer-7 and chequer-8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1_000..=1 << 24))]
    records: Option<u64>,
    /// Write every point of every curve to this file, as CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Draw the figure in this file, as SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print one JSON object a line for each published number, or for each measured ratio
    #[arg(long)]
    json: bool,
}

/// Source of a figure's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// The simulator, which predicts the numbers.
    Sim,
    /// A node that is measured over this fabric.
    Fabric(FabricArg),
}

const SIM: &str = "sim";

/// Parses, for clap, the name of a figure.
fn named(name: &str) -> Result<&'static PaperFigure, String> {
    PaperFigure::named(name).ok_or_else(|| {
        let names: Vec<&str> = FIGURES.into_iter().map(|which| which.name).collect();
        format!("unknown figure '{name}': name one of {}", names.join(", "))
    })
}

/// Lists the names of the figures whose measurement satisfies `is_meant`, separated by commas. The word `last` stands
/// before the last name.
fn listed(is_meant: impl Fn(&OnFabrics) -> bool, last: &str) -> String {
    let meant = FIGURES.into_iter().filter(|which| is_meant(&which.fabrics)).map(|which| which.name);
    let names: Vec<&str> = meant.collect();
    match names.split_last() {
        Some((end, names)) if !names.is_empty() => format!("{} {last} {end}", names.join(", ")),
        _ => names.concat(),
    }
}

/// Parses, for clap, the source of a figure's numbers.
fn fabric(name: &str) -> Result<Source, String> {
    if name == SIM {
        return Ok(Source::Sim);
    }
    FabricArg::from_str(name, false).map(Source::Fabric).map_err(|_| {
        let names: Vec<&str> = FabricArg::value_variants().iter().map(|fabric| fabric.name()).collect();
        format!("unknown fabric '{name}': name {SIM} or one of {}", names.join(", "))
    })
}

/// Parses, for clap, the name of a network distance.
fn distance(name: &str) -> Result<Distance, String> {
    Distance::ALL.into_iter().find(|distance| distance.name() == name).ok_or_else(|| {
        let names: Vec<&str> = Distance::ALL.into_iter().map(Distance::name).collect();
        format!("unknown distance '{name}': name one of {}", names.join(", "))
    })
}

/// Returns the powers of two below `most`, then `most` itself.
fn doubling(most: u32) -> impl Iterator<Item = u32> {
    let powers = std::iter::successors(Some(1), |clients| Some(clients * 2));
    powers.take_while(move |&clients| clients < most).chain([most])
}

impl Figure {
    pub(super) fn run(self) -> Done {
        if self.csv.is_some() && self.csv == self.svg {
            return Err(Failure::Error(
                "--csv and --svg name the same file: give two different files".into(),
            ));
        }
        // The files are checked first, because a figure takes minutes, which would be lost if a folder were missing.
        [&self.csv, &self.svg].into_iter().flatten().try_for_each(|path| files::check_writable(path))?;
        match self.fabric {
            Source::Sim => self.predict(),
            Source::Fabric(fabric) => self.measure(fabric),
        }
    }

    fn predict(self) -> Done {
        let measured = [
            ("--distance", self.distance.is_some()),
            ("--rounds", self.rounds.is_some()),
            ("--clients", self.clients.is_some()),
            ("--records", self.records.is_some()),
        ];
        if let Some((flag, _)) = measured.into_iter().find(|(_, is_given)| *is_given) {
            return Err(Failure::Error(format!(
                "{flag} applies to measurements, but the figure is predicted: omit it, or name a fabric, for example \
                 --fabric udp"
            )));
        }
        let prediction = self.which.predict(self.operations.unwrap_or(20_000)).map_err(Failure::Error)?;
        self.draw(&prediction.picture)?;
        let reported = if self.json { prediction.json() } else { prediction.table() };
        print_line!("{}", reported.trim_end());
        if prediction.is_met() {
            return Ok(());
        }
        Err(Failure::Error(format!(
            "the prediction of {} misses its tolerance: see the rows with NO",
            self.which.name
        )))
    }

    fn measure(self, fabric: FabricArg) -> Done {
        if self.operations.is_some() {
            return Err(Failure::Error(
                "--operations applies to predictions, but the figure is measured: give --rounds instead"
                    .into(),
            ));
        }
        let is_under_load =
            |fabrics: &OnFabrics| matches!(fabrics, OnFabrics::Stores(_) | OnFabrics::ByLength(_));
        if !is_under_load(&self.which.fabrics) && (self.clients.is_some() || self.records.is_some()) {
            return Err(Failure::Error(format!(
                "{} measures one op at a time: omit --clients and --records, or measure {}",
                self.which.name,
                listed(is_under_load, "or")
            )));
        }
        let measure = Measure {
            figure: self.which,
            fabric,
            distance: self.distance,
            rounds: self.rounds.unwrap_or(40),
            clients: self.clients.unwrap_or(TASKS_MAX as u32),
            records: self.records,
        };
        let measurement = measure.run()?;
        self.draw(&measurement.picture)?;
        let reported = if self.json { measurement.json() } else { measurement.table() };
        print_line!("{}", reported.trim_end());
        Ok(())
    }

    fn draw(&self, picture: &Picture) -> Done {
        if let Some(path) = &self.csv {
            files::write(path, picture.csv())?;
        }
        if let Some(path) = &self.svg {
            files::write(path, draw::svg(picture))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_double_up_to_the_most() {
        assert_eq!(doubling(1).collect::<Vec<_>>(), [1]);
        assert_eq!(doubling(6).collect::<Vec<_>>(), [1, 2, 4, 6]);
        assert_eq!(doubling(64).collect::<Vec<_>>(), [1, 2, 4, 8, 16, 32, 64]);
    }
}
