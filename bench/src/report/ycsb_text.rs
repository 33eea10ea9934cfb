//! Reports in YCSB's own text format, for scripts that read it.

use std::fmt::Write;

use super::{LatencyUs, LoadReport, YcsbReport};

/// Returns the report as the lines that YCSB's `TextMeasurementsExporter` prints.
pub fn ycsb_text(report: &YcsbReport) -> String {
    let mut text = report.load.as_ref().map_or_else(String::new, load_text);
    overall(&mut text, report.seconds, report.ops_per_s);
    for (name, done) in &report.operations {
        let name = name.to_uppercase();
        // With a schedule, YCSB reports the service time, and the latency since the operation was due.
        if let Some(service) = &done.service_us {
            operation(&mut text, &name, done.count, Some(service));
            operation(&mut text, &format!("Intended-{name}"), done.count, done.latency_us.as_ref());
        } else {
            operation(&mut text, &name, done.count, done.latency_us.as_ref());
        }
        line(&mut text, &name, "Return=OK", done.count);
    }
    if report.errors > 0 {
        line(&mut text, "FAILED", "Operations", report.errors);
    }
    text
}

/// Returns the report of a load phase as lines in the same format.
pub fn load_text(load: &LoadReport) -> String {
    let mut text = String::new();
    overall(&mut text, load.seconds, load.ops_per_s);
    operation(&mut text, "INSERT", load.records, Some(&load.latency_us));
    line(&mut text, "INSERT", "Return=OK", load.records);
    text
}

fn overall(text: &mut String, seconds: f64, ops_per_s: f64) {
    line(text, "OVERALL", "RunTime(ms)", (seconds * 1000.0).round());
    line(text, "OVERALL", "Throughput(ops/sec)", ops_per_s);
}

fn operation(text: &mut String, name: &str, count: u64, latency: Option<&LatencyUs>) {
    line(text, name, "Operations", count);
    let Some(latency) = latency else { return };
    for (what, us) in [
        ("AverageLatency(us)", latency.mean),
        ("MinLatency(us)", latency.min),
        ("MaxLatency(us)", latency.max),
        ("95thPercentileLatency(us)", latency.p95),
        ("99thPercentileLatency(us)", latency.p99),
    ] {
        line(text, name, what, us);
    }
}

fn line(text: &mut String, of: &str, what: &str, value: impl std::fmt::Display) {
    writeln!(text, "[{of}], {what}, {value}").expect("a string grows");
}
