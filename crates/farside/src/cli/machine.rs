//! The machine on which this runs: what readers of figures need to judge them, and how much memory can be had.
//!
//! Invariant: what the system does not tell is left out, and not guessed.

use super::human_bytes;
use serde::Serialize;
use std::fs::read_to_string;

/// A machine, as the system describes it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Machine {
    /// This program's.
    pub(super) release: String,
    /// How this program was built.
    pub(super) build: String,
    /// When it began, in UTC.
    pub(super) date: String,
    /// The processor's name.
    pub(super) processor: Option<String>,
    /// Cores that this process may use.
    pub(super) cores: Option<usize>,
    /// Whether the processor says that it is a virtual one.
    pub(super) is_virtual: bool,
    pub(super) kernel: Option<String>,
    pub(super) memory_bytes: Option<u64>,
    /// Huge pages of 2 MiB or so that are reserved.
    pub(super) huge_pages: Option<u64>,
    /// Tasks that were running or waiting to, on average over the minute before it began.
    pub(super) load_at_start: Option<f64>,
    /// The same at the end, this program's own included.
    pub(super) load_at_end: Option<f64>,
}

impl Machine {
    /// This one, now.
    pub(super) fn here() -> Machine {
        // Of a file that cannot be read nothing is found.
        let [cpuinfo, meminfo] =
            ["cpuinfo", "meminfo"].map(|name| read_to_string(format!("/proc/{name}")).unwrap_or_default());
        let kernel = read_to_string("/proc/sys/kernel/osrelease").ok();
        Machine {
            release: env!("CARGO_PKG_VERSION").into(),
            build: build().into(),
            date: date(),
            processor: processor(&cpuinfo),
            cores: std::thread::available_parallelism().ok().map(usize::from),
            is_virtual: is_virtual(&cpuinfo),
            kernel: kernel.map(|release| format!("Linux {}", release.trim())),
            memory_bytes: bytes(&meminfo, "MemTotal"),
            huge_pages: number(&meminfo, "HugePages_Total"),
            load_at_start: load(),
            load_at_end: None,
        }
    }

    /// In a line: what there is, and what else there was to do.
    pub(super) fn told(&self) -> String {
        let cores = self.cores.map(|cores| {
            let kind = if self.is_virtual { " virtual" } else { "" };
            format!("{cores}{kind} core{}", if cores == 1 { "" } else { "s" })
        });
        let load = |when: &str, load: Option<f64>| load.map(|load| format!("load {load:.2} {when}"));
        let parts = [
            self.processor.clone(),
            cores,
            self.memory_bytes.map(|bytes| format!("{} of memory", human_bytes(bytes))),
            self.kernel.clone(),
            load("before", self.load_at_start),
            load("after", self.load_at_end),
        ];
        parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }

    /// The load is now that at the end.
    pub(super) fn ended(&mut self) {
        self.load_at_end = load();
    }
}

fn build() -> &'static str {
    match (cfg!(debug_assertions), std::env::consts::ARCH) {
        (true, _) => "a development build, with debug assertions",
        (false, "x86_64") => "a release build, for x86_64",
        (false, "aarch64") => "a release build, for aarch64",
        (false, _) => "a release build",
    }
}

/// In UTC, to the second.
fn date() -> String {
    use tracing_subscriber::fmt::format::Writer;
    use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
    let mut text = String::new();
    SystemTime.format_time(&mut Writer::new(&mut text)).expect("a string takes all that is written to it");
    text.split('.').next().unwrap_or_default().replace('T', " ")
}

fn load() -> Option<f64> {
    read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

/// What stands beside `name` in a list of `name : value`.
fn field<'a>(list: &'a str, name: &str) -> Option<&'a str> {
    let fields = list.lines().filter_map(|line| line.split_once(':'));
    let mut values = fields.filter(|(key, _)| key.trim() == name).map(|(_, value)| value.trim());
    values.find(|value| !value.is_empty())
}

fn processor(cpuinfo: &str) -> Option<String> {
    ["model name", "Processor", "cpu"].into_iter().find_map(|name| field(cpuinfo, name)).map(str::to_owned)
}

fn is_virtual(cpuinfo: &str) -> bool {
    field(cpuinfo, "flags").is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor"))
}

/// What /proc/meminfo has in a line such as `HugePages_Total:       7`.
fn number(meminfo: &str, name: &str) -> Option<u64> {
    field(meminfo, name)?.split_whitespace().next()?.parse().ok()
}

/// The same of a line in units of 1024 bytes, such as `MemAvailable:    1024 kB`.
pub(super) fn bytes(meminfo: &str, name: &str) -> Option<u64> {
    number(meminfo, name)?.checked_mul(1 << 10)
}

/// Memory and swap that can be had now.
pub(super) fn available(meminfo: &str) -> Option<u64> {
    bytes(meminfo, "MemAvailable")?.checked_add(bytes(meminfo, "SwapFree").unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_is_named_where_the_system_names_it() {
        let text = "processor\t: 0\nmodel name\t: A & B <8>\nflags\t\t: fpu hypervisor avx\n";
        assert_eq!(processor(text).as_deref(), Some("A & B <8>"));
        assert!(is_virtual(text));
        assert_eq!((processor("processor : 0\nBogoMIPS : 5\n"), is_virtual("flags : fpu\n")), (None, false));
    }

    #[test]
    fn sizes_are_read_by_name() {
        let text = "MemTotal:       24653800 kB\nHugePages_Total:       7\n";
        assert_eq!(bytes(text, "MemTotal"), Some(24_653_800 << 10));
        assert_eq!(number(text, "HugePages_Total"), Some(7));
        assert_eq!((bytes(text, "MemFree"), number("MemTotal: many\n", "MemTotal")), (None, None));
    }

    #[test]
    fn a_date_is_a_day_and_a_time() {
        let date = date();
        let shape: String = date.chars().map(|c| if c.is_ascii_digit() { '9' } else { c }).collect();
        assert!(shape.starts_with("9999-99-99 99:99:99"), "{date}");
    }
}
