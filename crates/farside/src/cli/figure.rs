//! `figure`: a paper's figure as the simulator predicts it, beside what was published.

use super::{Done, Failure};
use farside::figure::{Figure as Which, draw};
use std::path::{Path, PathBuf};

/// Predict a paper's figure from micro-benchmarks alone, and hold it to what was published
#[derive(clap::Args)]
pub(super) struct Figure {
    /// prism-1, prism-2, prism-3, prism-4 or synchronization-4
    #[arg(value_name = "NAME", value_parser = named)]
    which: Which,
    /// Operations that each point under load is measured over
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1_000..=10_000_000))]
    operations: u64,
    /// Write every point of every curve to this file
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Draw it in this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Each published number as one JSON object a line
    #[arg(long)]
    json: bool,
}

/// For clap: a figure.
fn named(name: &str) -> Result<Which, String> {
    Which::ALL.into_iter().find(|which| which.name() == name).ok_or_else(|| {
        let names: Vec<&str> = Which::ALL.into_iter().map(Which::name).collect();
        format!("there is no figure '{name}': name one of {}", names.join(", "))
    })
}

impl Figure {
    pub(super) fn run(self) -> Done {
        let prediction = self.which.predict(self.operations).map_err(Failure::Told)?;
        if let Some(path) = &self.csv {
            write(path, &prediction.csv())?;
        }
        if let Some(path) = &self.svg {
            write(path, &draw::svg(&prediction))?;
        }
        let told = if self.json { prediction.json() } else { prediction.table() };
        tell!("{}", told.trim_end());
        if prediction.is_met() {
            return Ok(());
        }
        Err(Failure::Told(format!(
            "{} is not predicted as closely as it is to be: see the rows that say NO",
            self.which.name()
        )))
    }
}

fn write(path: &Path, text: &str) -> Done {
    std::fs::write(path, text).map_err(|error| {
        Failure::Told(format!("cannot write '{}': {error}; name a file that can be written", path.display()))
    })
}
