//! Tests of the page, with invented measurements.

use super::super::measure::{Settings, Stopped};
use super::*;
use crate::cli::machine::Machine;
use farside_bench::compare::rows::Sides;
use farside_bench::report::{CpuSeconds, FloorReport, PerOp, Spread};
use std::collections::BTreeMap;

const HOSTILE: &str = "\"><script>alert('x')</script> & <b>\u{7}";

fn latencies(p50: f64) -> LatencyUs {
    LatencyUs {
        mean: p50 * 1.1,
        min: p50 / 2.0,
        p50,
        p95: p50 * 2.0,
        p99: p50 * 3.0,
        p999: p50 * 9.0,
        max: p50 * 99.0,
    }
}

fn run(fabric: &str, workload: &str, tasks: u64) -> YcsbReport {
    YcsbReport {
        system: "prism-kv".into(),
        fabric: fabric.into(),
        workload: workload.into(),
        distribution: "uniform".into(),
        records: 1000,
        value_size: 512,
        scheme: None,
        calls: None,
        keys: None,
        rung: None,
        replicas: None,
        threads: 1,
        tasks,
        target_ops_per_s: None,
        verified: false,
        load: None,
        seconds: 0.5,
        load_factor: Some(0.25),
        mean_probes: Some(1.25),
        page_size: Some(4096),
        ops_per_s: 123_457.0 * tasks as f64 + fabric.len() as f64,
        repeats_ops_per_s: vec![],
        latency_us: latencies(7.25 * tasks as f64),
        operations: BTreeMap::new(),
        per_op: PerOp { round_trips: 1.17, requests: 1.19, bytes_out: 71.0, bytes_in: 603.0, atomics: 0.31 },
        cpu_s_per_mop: CpuSeconds { client: 0.43, node: (fabric != "local").then_some(0.57) },
        errors: 0,
        violations: 0,
        longest_stall_ms: None,
        read_back: None,
        index: Default::default(),
        keys_per_transaction: None,
        abort_rate: None,
        mix: Default::default(),
        transactions: Default::default(),
        nodes: Vec::new(),
    }
}

fn compared(contender: &str, depth: u32) -> CompareReport {
    CompareReport {
        contender: contender.into(),
        version: "1".into(),
        workload: "c".into(),
        distribution: "uniform".into(),
        records: 1000,
        value_size: 512,
        threads: 1,
        depth,
        batches: None,
        cores: Some(Cores::Two),
        client: Some(Client::Looks),
        rounds: 5,
        ops_per_s: Spread { median: 654_321.0, min: 600_001.0, max: 700_003.0 },
        latency_us: Some(latencies(3.5)),
        cpu_s_per_mop: Some(Sides { client: 0.71, server: Some(0.83) }),
        of_better_rival: Some(Spread { median: 1.37, min: 1.0, max: 2.0 }),
        is_cross_check: false,
    }
}

/// Rate of a floor with one operation in flight.
fn floor_rate(workload: &str) -> f64 {
    if workload == "a" { 138_889.0 } else { 345_678.0 }
}

fn results() -> Results {
    let runs = ["local", "shm", "ring", "udp", "tcp", "tls"].into_iter().flat_map(|fabric| {
        let reads = DEPTHS.into_iter().map(move |tasks| run(fabric, "c", tasks.into()));
        reads.chain([run(fabric, "a", MIDDLE.into())])
    });
    let floor = |fabric: &str, workload: &str, tasks: u32| FloorReport {
        fabric: fabric.into(),
        workload: workload.into(),
        tasks: tasks.into(),
        page_size: 4096,
        rtt_us_p50: 0.5,
        ops_per_s: floor_rate(workload) * f64::from(tasks),
        cpu_s_per_mop: None,
    };
    Results {
        settings: Settings { records: 1000, value_size: 512, each: Duration::from_millis(500) },
        machine: Machine {
            release: "1.2.3".into(),
            build: "a release build".into(),
            date: "2031-02-03 04:05:06".into(),
            processor: Some(HOSTILE.into()),
            cores: Some(2),
            is_virtual: true,
            kernel: Some(HOSTILE.into()),
            memory_bytes: Some(3 << 30),
            huge_pages: Some(0),
            load_at_start: Some(0.27),
            load_at_end: Some(1.73),
        },
        stopped: Stopped {
            fabric: "shm".into(),
            tasks: MIDDLE,
            pid: 4711,
            intervals: (1..=60).map(|n| (f64::from(n) / 20.0, 1e6 + f64::from(n))).collect(),
            stopped_at_s: 1.0,
            continued_at_s: 2.0,
            before_ops_per_s: 1_000_010.0,
            while_ops_per_s: 1_000_030.0,
            after_ops_per_s: 1_000_050.0,
        },
        floors: ["shm", "ring", "udp", "tcp"]
            .into_iter()
            .flat_map(|fabric| {
                let reads = ENDS.map(|tasks| floor(fabric, "c", tasks));
                reads.into_iter().chain([floor(fabric, "a", MIDDLE)])
            })
            .collect(),
        runs: runs.collect(),
        compared: [1, 64]
            .into_iter()
            .flat_map(|depth| [compared("redis", depth), compared("farside udp", depth)])
            .collect(),
        versions: vec![format!("Redis {HOSTILE}")],
        skipped: vec![format!("memcached {HOSTILE}")],
        cores: "server on CPU 0, client on CPU 1".into(),
    }
}

/// Returns the cells of all tables of a page, row by row.
fn rows(page: &str) -> Vec<Vec<String>> {
    let lines = page.lines().filter(|line| line.starts_with("<tr>"));
    let cells = |line: &str| {
        let line = line.replace("<th scope=\"row\">", "<td>").replace("</th>", "</td>");
        let cells = line.split("<td>").skip(1);
        cells.map(|cell| cell.split("</td>").next().unwrap_or_default().to_owned()).collect()
    };
    lines.map(cells).collect()
}

fn count(text: &str, part: &str) -> usize {
    text.matches(part).count()
}

#[test]
fn a_page_loads_nothing_and_runs_nothing() {
    // `url(#` refers to a part of the same figure.
    let page = page(&results()).replace("url(#", "(#");
    assert!(page.find(MARK).is_some_and(|at| at + MARK.len() <= MARKED_WITHIN as usize));
    for absent in
        ["http", "//", "<script", "<img", "<link", "<iframe", "@import", "url(", "src=", " onload", "href"]
    {
        assert!(!page.to_lowercase().contains(absent), "{absent} is on the page");
    }
}

#[test]
fn text_from_the_machine_is_escaped() {
    let page = page(&results());
    assert_eq!(count(&page, "<b>"), 0);
    let text = "&quot;&gt;&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; &lt;b&gt;\u{fffd}";
    // The text occurs as the processor, the kernel, a version, and a skipped rival.
    assert_eq!(count(&page, text), 4);
}

#[test]
fn every_figure_has_its_table_and_its_command() {
    let page = page(&results());
    let sections: Vec<&str> = page.split("<section>").skip(1).collect();
    assert_eq!(sections.len(), 7);
    for section in sections {
        let section = section.split("</section>").next().unwrap_or_default();
        assert!(count(section, "<svg ") >= 1 && count(section, "<svg ") == count(section, "</svg>"));
        assert_eq!((count(section, "<table>"), count(section, "<pre><code>")), (1, 1), "{section}");
        let command = section.split("<pre><code>").nth(1).unwrap_or_default();
        assert!(command.contains("farside "), "{command}");
        assert!(command.contains("--records 1000 --value-size 512"), "{command}");
    }
}

#[test]
fn the_tables_contain_all_measurements() {
    let results = results();
    let rows = rows(&page(&results));
    let has = |cells: &[&str]| {
        assert!(rows.iter().any(|row| row.iter().map(String::as_str).eq(cells.iter().copied())), "{cells:?}");
    };
    for run in &results.runs {
        let which = [&*run.fabric, &run.workload, &run.tasks.to_string()];
        let rate = run.ops_per_s.to_string();
        let us = [7.25, 14.5, 21.75, 65.25, 717.75].map(|us| format!("{:.2}", us * run.tasks as f64));
        let [p50, p95, p99, p999, max] = us.each_ref().map(String::as_str);
        let node = if run.fabric == "local" { "-" } else { "0.57" };
        has(&[&which[..], &[&rate, p50]].concat());
        has(&[&which[..], &[p50, p95, p99, p999, max]].concat());
        has(&[&which[..], &["0.43", node]].concat());
        has(&[&which[..], &["1.17", "1.19", "71", "603", "0.31"]].concat());
        let is_held = run.workload == "a" || ENDS.map(u64::from).contains(&run.tasks);
        let ratio = format!("{:.2}", run.ops_per_s / (floor_rate(&run.workload) * run.tasks as f64));
        has(&[&which[..], &[&rate, if is_held { &ratio } else { "-" }]].concat());
    }
    has(&["while it is stopped", "1000030"]);
    has(&["by hand, udp", "c", "64", "22123392", "1.00"]);
    has(&["by hand, tcp", "a", "16", "2222224", "1.00"]);
    let us = ["3.50", "10.50", "0.71", "0.83", "1.37"];
    has(&[&["redis", "64", "654321", "600001 to 700003"][..], &us].concat());
    has(&["load average at the end", "1.73"]);
    has(&["cores that it may use", "2 (virtual)"]);
    has(&["memory", "3.0 GiB"]);
}

#[test]
fn skipped_rivals_are_listed_instead_of_a_figure() {
    let nobody = Results { compared: Vec::new(), ..results() };
    let page = page(&nobody);
    assert_eq!(count(&page, "<section>"), 6);
    assert!(page.contains("Skipped rivals") && !page.contains("Comparison with rivals"));
}

#[test]
fn a_page_needs_no_facts_about_the_machine() {
    let machine = Machine { release: "1".into(), build: "b".into(), ..Machine::default() };
    let page = page(&Results { machine, ..results() });
    assert!(!page.contains("load average at the end</th>") && page.contains("<h2>The machine</h2>"));
}
