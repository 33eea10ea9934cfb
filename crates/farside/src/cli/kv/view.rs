//! Formats the output of `kv stat --watch`: a full screen, or else one line or JSON object for each sample.
//!
//! Invariant: the output is a function of the samples and of the screen's width.

use super::watch::Sample;
use crate::cli::human_bytes;
use farside_remote::control::Traffic;
use serde_json::json;
use std::collections::VecDeque;
use std::time::Duration;

/// Maximum number of samples in a sparkline.
const PAST: usize = 60;
/// Width of the name at the start of a line, in columns; below it, the width of the figure after the name.
const NAME_WIDTH: usize = 14;
const FIGURE_WIDTH: usize = 14;

/// A rate: its name, a function that returns the counter it is computed from, and a function that formats it.
type Rate = (&'static str, fn(&Traffic) -> u64, fn(f64) -> String);

const RATES: [Rate; 5] = [
    ("chains/s", |traffic| traffic.chains, count),
    ("ops/s", |traffic| traffic.ops, count),
    ("atomics/s", |traffic| traffic.atomics, count),
    ("requests/s", |traffic| traffic.request_bytes, |bytes| human_bytes(bytes as u64)),
    ("replies/s", |traffic| traffic.reply_bytes, |bytes| human_bytes(bytes as u64)),
];

/// The screen of a store, which shows the last [`PAST`] samples. The newest sample is first.
pub(super) struct View {
    url: String,
    store: String,
    samples: VecDeque<Sample>,
}

impl View {
    pub(super) fn new(url: &str, store: &str) -> View {
        View { url: url.to_owned(), store: store.to_owned(), samples: VecDeque::new() }
    }

    pub(super) fn push(&mut self, sample: Sample) {
        self.samples.truncate(PAST - 1);
        self.samples.push_front(sample);
    }

    /// Returns the screen's lines while there is no sample. `reason` says why there is none.
    pub(super) fn waiting(&self, reason: &str) -> Vec<String> {
        vec![self.title(), String::new(), reason.to_owned()]
    }

    /// Returns the screen's lines for the latest sample.
    pub(super) fn lines(&self, columns: usize) -> Vec<String> {
        let Some(sample) = self.samples.front() else { return self.waiting("sampling ...") };
        let mut lines = vec![self.title(), String::new()];
        match sample.traffic {
            None => {
                lines.push("no rates: they require an admin's token, or a newer release of the node".into())
            }
            Some(_) => {
                for (name, of, text) in RATES {
                    let rate = |sample: &Sample| {
                        sample.traffic.as_ref().map_or(0.0, |traffic| per_second(of(traffic), sample))
                    };
                    lines.push(self.row(columns, name, &text(rate(sample)), rate));
                }
            }
        }
        let probe = |sample: &Sample| sample.probe.as_ref().map_or(0.0, |(median, _)| median.as_secs_f64());
        match &sample.probe {
            Ok((median, most)) => {
                lines.push(self.row(columns, "probe, median", &micros(*median), probe));
                lines.push(format!("{:<NAME_WIDTH$}{:>FIGURE_WIDTH$}", "probe, max", micros(*most)));
            }
            Err(reason) => lines.push(format!("no probe: {reason}")),
        }
        lines.push(String::new());
        let stat = &sample.stat;
        let parts = [
            ('▓', "table", stat.table_bytes),
            ('█', "live", stat.live_bytes),
            ('▒', "free", stat.free_bytes),
            ('░', "never used", stat.granted_bytes),
        ];
        let width = columns.saturating_sub(NAME_WIDTH + 2).clamp(10, 100);
        lines.push(format!("{:<NAME_WIDTH$}{}", "memory", bar(&parts, stat.quota_bytes, width)));
        let legend: Vec<String> = parts
            .iter()
            .map(|(sign, name, bytes)| format!("{sign} {name} {}", human_bytes(*bytes)))
            .collect();
        lines.push(format!("{:<NAME_WIDTH$}{}  of {}", "", legend.join("  "), human_bytes(stat.quota_bytes)));
        lines.push(format!(
            "{:<NAME_WIDTH$}{} live, {} free, {} retired, {} parked",
            "buffers", stat.live_buffers, stat.free_buffers, stat.retired_buffers, stat.parked_buffers
        ));
        lines.push(format!(
            "{:<NAME_WIDTH$}{} buffers/s reclaimed, {} leaked buffers/s found",
            "reclamation",
            count(per_second(sample.reclaimed, sample)),
            count(per_second(sample.lost, sample))
        ));
        lines.push(format!("{:<NAME_WIDTH$}{} of this store in total", "leak scans", stat.scans));
        for pid in &stat.delaying_pids {
            lines.push(format!(
                "{:<NAME_WIDTH$}waits for process {pid}; if it is stopped: kill -CONT {pid}",
                ""
            ));
        }
        for id in &stat.delaying_ids {
            lines.push(format!("{:<NAME_WIDTH$}waits for an operation of client id {id}", ""));
        }
        if let Some(percent) = stat.moved_percent {
            lines.push(format!("{:<NAME_WIDTH$}{percent} % moved from the former table", "table"));
        }
        lines.push(format!("{:<NAME_WIDTH$}{}, without this one", "sessions", sample.sessions));
        if sample.nodes > 1 {
            let answering = sample.nodes - sample.silent.len();
            lines.push(format!("{:<NAME_WIDTH$}{answering} of {} answer", "nodes", sample.nodes));
        }
        lines.extend(sample.silent.iter().map(|(_, reason)| format!("{:<NAME_WIDTH$}{reason}", "")));
        let (not_ready, refused) =
            sample.traffic.map_or((0, 0), |traffic| (traffic.not_ready, traffic.refused));
        lines.push(format!(
            "{:<NAME_WIDTH$}{} by engines in total; {} chains/s refused, {} chains/s without a buffer",
            "refusals",
            sample.refusals,
            count(per_second(refused, sample)),
            count(per_second(not_ready, sample))
        ));
        lines
    }

    /// Returns the heading of the columns that [`line`] formats.
    pub(super) fn heading(&self) -> String {
        COLUMNS.iter().map(|name| format!("{name:>11}")).collect::<Vec<_>>().join(" ")
    }

    fn title(&self) -> String {
        let node = self.samples.front().map_or(String::new(), |sample| match sample.pid {
            0 => String::new(),
            pid => format!(", process {pid}"),
        });
        format!("store '{}' at {}{node}   q quits", self.store, self.url)
    }

    /// Formats a line of the screen: the name, the figure, and the sparkline of its past values.
    fn row(&self, columns: usize, name: &str, figure: &str, of: impl Fn(&Sample) -> f64) -> String {
        let room = columns.saturating_sub(NAME_WIDTH + FIGURE_WIDTH + 4).min(PAST);
        let past: Vec<f64> = self.samples.iter().take(room).rev().map(of).collect();
        let line = format!("{name:<NAME_WIDTH$}{figure:>FIGURE_WIDTH$}  {}", sparkline(&past));
        line.trim_end().to_owned()
    }
}

const COLUMNS: [&str; 12] = [
    "chains/s",
    "ops/s",
    "atomics/s",
    "requests/s",
    "replies/s",
    "live",
    "free",
    "never used",
    "reclaimed/s",
    "sessions",
    "probe p50",
    "probe max",
];

/// Formats a sample as a line of columns.
pub(super) fn line(sample: &Sample) -> String {
    let rate =
        |of: fn(&Traffic) -> u64| sample.traffic.as_ref().map(|traffic| per_second(of(traffic), sample));
    let counted = |of| rate(of).map_or("-".into(), count);
    let bytes = |of| rate(of).map_or("-".into(), |bytes| human_bytes(bytes as u64));
    let probe = |which: fn(&(Duration, Duration)) -> Duration| {
        sample.probe.as_ref().map_or("-".into(), |probe| micros(which(probe)))
    };
    let figures = [
        counted(|traffic| traffic.chains),
        counted(|traffic| traffic.ops),
        counted(|traffic| traffic.atomics),
        bytes(|traffic| traffic.request_bytes),
        bytes(|traffic| traffic.reply_bytes),
        human_bytes(sample.stat.live_bytes),
        human_bytes(sample.stat.free_bytes),
        human_bytes(sample.stat.granted_bytes),
        count(per_second(sample.reclaimed, sample)),
        sample.sessions.to_string(),
        probe(|&(median, _)| median),
        probe(|&(_, most)| most),
    ];
    figures.map(|figure| format!("{figure:>11}")).join(" ")
}

/// Formats a sample as a JSON object. Rates are per second, and `null` if the node does not report them.
pub(super) fn object(sample: &Sample) -> serde_json::Value {
    let rate =
        |of: fn(&Traffic) -> u64| sample.traffic.as_ref().map(|traffic| per_second(of(traffic), sample));
    let us = |which: fn(&(Duration, Duration)) -> Duration| {
        sample.probe.as_ref().ok().map(|probe| which(probe).as_secs_f64() * 1e6)
    };
    let mut object = json!({
        "seconds": sample.since.as_secs_f64(),
        "interval_seconds": sample.lasted.as_secs_f64(),
        "chains_per_s": rate(|traffic| traffic.chains),
        "ops_per_s": rate(|traffic| traffic.ops),
        "atomics_per_s": rate(|traffic| traffic.atomics),
        "request_bytes_per_s": rate(|traffic| traffic.request_bytes),
        "reply_bytes_per_s": rate(|traffic| traffic.reply_bytes),
        "not_ready_per_s": rate(|traffic| traffic.not_ready),
        "refused_per_s": rate(|traffic| traffic.refused),
        "retired_buffers_per_s": rate(|traffic| traffic.retired_buffers),
        "reclaimed_buffers_per_s": per_second(sample.reclaimed, sample),
        "lost_buffers_per_s": per_second(sample.lost, sample),
        "probe_us_p50": us(|&(median, _)| median),
        "probe_us_max": us(|&(_, most)| most),
        "sessions": sample.sessions,
        "refusals": sample.refusals,
        "stat": sample.stat,
    });
    if sample.nodes > 1 {
        object["nodes"] = sample.nodes.into();
        object["nodes_answering"] = (sample.nodes - sample.silent.len()).into();
    }
    object
}

fn per_second(count: u64, sample: &Sample) -> f64 {
    count as f64 / sample.lasted.as_secs_f64().max(1e-9)
}

/// Formats a number with about three digits and a decimal unit, such as k or M.
fn count(number: f64) -> String {
    match number {
        1e9.. => format!("{:.2} G", number / 1e9),
        1e6.. => format!("{:.2} M", number / 1e6),
        1e4.. => format!("{:.1} k", number / 1e3),
        _ => format!("{number:.0}"),
    }
}

fn micros(time: Duration) -> String {
    format!("{:.1} us", time.as_secs_f64() * 1e6)
}

/// Draws each figure as a bar with a height in eighths of a line. The greatest figure has the full height.
fn sparkline(past: &[f64]) -> String {
    const SIGNS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let most = past.iter().copied().fold(0.0, f64::max);
    let sign = |&figure: &f64| {
        let eighths = if most > 0.0 { figure / most * 8.0 } else { 0.0 };
        SIGNS[(eighths.ceil() as usize).clamp(1, 8) - 1]
    };
    past.iter().map(sign).collect()
}

/// Draws the parts of `whole` as a bar of `width` columns. A part consists of its sign, its name and its size. The
/// remainder of the bar is blank.
fn bar(parts: &[(char, &str, u64)], whole: u64, width: usize) -> String {
    let (mut text, mut sum) = (String::from("["), 0u64);
    let mut drawn = 0;
    for &(sign, _, bytes) in parts {
        sum = sum.saturating_add(bytes).min(whole);
        let until = (sum as f64 / whole.max(1) as f64 * width as f64).round() as usize;
        text.extend(std::iter::repeat_n(sign, until.saturating_sub(drawn)));
        drawn = until.max(drawn);
    }
    text.extend(std::iter::repeat_n(' ', width.saturating_sub(drawn)));
    text + "]"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(chains: u64, traffic: bool) -> Sample {
        let traffic = traffic.then(|| Traffic { chains, reply_bytes: 3 << 20, ..Traffic::default() });
        Sample {
            since: Duration::from_secs(9),
            lasted: Duration::from_secs(2),
            pid: 7,
            sessions: 3,
            nodes: 1,
            silent: Vec::new(),
            stat: farside::StoreStat {
                quota_bytes: 1000,
                table_bytes: 250,
                live_bytes: 500,
                delaying_pids: vec![42],
                scans: 5,
                ..Default::default()
            },
            traffic,
            reclaimed: 8,
            lost: 0,
            refusals: 1,
            probe: Ok((Duration::from_nanos(2500), Duration::from_micros(9))),
        }
    }

    #[test]
    fn a_rate_is_per_second_and_has_a_sparkline() {
        let mut view = View::new("shm:x", "s");
        for chains in [0, 1_000_000, 4_000_000] {
            view.push(sample(chains, true));
        }
        let lines = view.lines(80);
        let starts = |name: &str| lines.iter().find(|line| line.starts_with(name)).expect(name);
        assert!(starts("chains/s").contains("2.00 M  ▁▂█"), "{}", starts("chains/s"));
        assert!(starts("replies/s").contains("1.5 MiB  ███"), "{}", starts("replies/s"));
        assert!(starts("probe, median").contains("2.5 us"));
        assert!(starts("reclamation").contains("4 buffers/s reclaimed"));
        assert!(starts("leak scans").contains("5 of this store in total"));
        assert!(lines.iter().any(|line| line.contains("kill -CONT 42")));
        assert!(view.lines(10).len() == lines.len(), "a narrow screen has the same lines");
    }

    #[test]
    fn an_unreported_rate_is_not_shown_as_zero() {
        let mut view = View::new("shm:x", "s");
        view.push(sample(5, false));
        assert!(view.lines(80).iter().any(|line| line.contains("require an admin's token")));
        assert!(line(&sample(5, false)).trim_start().starts_with('-'));
        assert!(object(&sample(5, false))["chains_per_s"].is_null());
        assert_eq!(object(&sample(5, true))["chains_per_s"], 2.5);
    }

    #[test]
    fn a_bar_has_its_width_for_any_parts() {
        for (parts, expected) in [
            ([250, 500, 0, 250], "[▓▓▓█████░░]"),
            ([0, 0, 0, 0], "[          ]"),
            ([1000, 1000, 0, u64::MAX], "[▓▓▓▓▓▓▓▓▓▓]"),
        ] {
            let signs = ['▓', '█', '▒', '░'];
            let parts: Vec<_> = signs.into_iter().zip(parts).map(|(sign, bytes)| (sign, "", bytes)).collect();
            assert_eq!(bar(&parts, 1000, 10), expected);
        }
        assert_eq!(bar(&[('x', "", 5)], 0, 3), "[   ]");
    }
}
