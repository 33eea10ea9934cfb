//! Describes this machine for readers of measurements, and determines its available memory.
//!
//! Invariant: a value that the system does not report is omitted, not guessed.

use super::human_bytes;
use serde::Serialize;
use std::fs::read_to_string;

/// Description of a machine, as its operating system reports it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Machine {
    /// Release of this program.
    pub(super) release: String,
    /// Kind of build of this program, such as "a release build, for x86_64".
    pub(super) build: String,
    /// Date and time at which the measurement started, in UTC.
    pub(super) date: String,
    /// Name of the processor.
    pub(super) processor: Option<String>,
    /// Cores that this process may use.
    pub(super) cores: Option<usize>,
    /// Whether the processor reports a hypervisor.
    pub(super) is_virtual: bool,
    pub(super) kernel: Option<String>,
    pub(super) memory_bytes: Option<u64>,
    /// Number of reserved huge pages of the default size.
    pub(super) huge_pages: Option<u64>,
    /// Load average of the minute before the start: the mean number of tasks that run or wait for a core.
    pub(super) load_at_start: Option<f64>,
    /// Load average of the minute before the end, which includes this program.
    pub(super) load_at_end: Option<f64>,
}

impl Machine {
    /// Describes this machine, as it is at the time of the call.
    pub(super) fn current() -> Machine {
        // An unreadable file counts as empty, so its values are omitted.
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

    /// Formats the machine and its load as one line, for people.
    pub(super) fn description(&self) -> String {
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

    /// Records the load average at the end of the measurement.
    pub(super) fn record_end_load(&mut self) {
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

/// Returns the current date and time in UTC, to the second.
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

/// Returns the first non-empty value of `name` in a list of lines `name : value`.
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

/// Returns the number in the line `name` of /proc/meminfo: 7 for the line `HugePages_Total:       7`.
fn number(meminfo: &str, name: &str) -> Option<u64> {
    field(meminfo, name)?.split_whitespace().next()?.parse().ok()
}

/// Returns the bytes of the line `name` of /proc/meminfo, which is in units of 1024 bytes: 1 MiB for the line
/// `MemAvailable:    1024 kB`.
pub(super) fn bytes(meminfo: &str, name: &str) -> Option<u64> {
    number(meminfo, name)?.checked_mul(1 << 10)
}

/// Returns the sum of available memory and free swap, in bytes. `meminfo` is the content of /proc/meminfo.
pub(super) fn available(meminfo: &str) -> Option<u64> {
    bytes(meminfo, "MemAvailable")?.checked_add(bytes(meminfo, "SwapFree").unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_has_a_name_only_if_the_system_reports_it() {
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
