//! Generates the demo's web page: one file that a browser shows without a network, and whose figures are this run's
//! measurements.
//!
//! Invariant: a page loads nothing and runs nothing: no script, no image, no external style or font.
//! Invariant: below each figure are the same numbers as a table, and the command that measures them again.
//! Invariant: text from the machine, such as the processor's name, is escaped and never becomes markup.

use super::measure::{DEPTHS, ENDS, MIDDLE, ROUNDS, Results};
use super::picture::{self, Axis, Curve, Mark, Scale, nines};
use crate::cli::human_bytes;
use farside_bench::compare::rows::{Client, CompareReport, Cores};
use farside_bench::report::{LatencyUs, YcsbReport};
use std::fmt::Write;
use std::time::Duration;

/// Text that marks a file as a page of the demo. The mark is within the first [`MARKED_WITHIN`] bytes of the file.
pub(super) const MARK: &str = "<meta name=\"generator\" content=\"farside demo\">";
pub(super) const MARKED_WITHIN: u64 = 512;

/// A figure with its text, table and command.
struct Figure {
    title: &'static str,
    /// Text that explains the figure.
    text: String,
    pictures: Vec<(String, String)>,
    table: Cells,
    command: String,
}

/// A table of text cells.
struct Cells {
    heading: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

/// Returns the page as HTML.
pub(super) fn page(results: &Results) -> String {
    let mut html = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n{MARK}\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>farside demo</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
    );
    let settings = results.settings;
    let add = &mut html;
    add.push_str("<h1>Results of <code>farside demo</code></h1>\n");
    paragraph(
        add,
        &format!(
            "A store of {} records of {} bytes, on this machine, {} UTC. One client thread reads it uniformly; each \
             measurement took {} s. Every number here was measured in this run.",
            settings.records,
            settings.value_size,
            results.machine.date,
            settings.each.as_secs_f64()
        ),
    );
    let figures = [
        Some(stopped(results)),
        Some(load(results)),
        Some(latencies(results)),
        Some(processor_time(results)),
        Some(traffic(results)),
        Some(floor(results)),
        comparison(results),
    ];
    for figure in figures.iter().flatten() {
        push_figure(add, figure);
    }
    if !results.skipped.is_empty() {
        add.push_str("<h2>Skipped rivals</h2>\n<ul>\n");
        results.skipped.iter().for_each(|reported| item(add, reported));
        add.push_str("</ul>\n");
    }
    add.push_str("<h2>How to read these numbers</h2>\n<ul>\n");
    caveats(results).iter().for_each(|reported| item(add, reported));
    add.push_str("</ul>\n<h2>The machine</h2>\n");
    push_table(add, "machine", &machine(results));
    add.push_str("</main>\n</body>\n</html>\n");
    html
}

/// Escapes text for HTML, so that it is also safe within the quotes of an attribute.
pub(super) fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            c if c.is_control() && c != '\n' => safe.push('\u{fffd}'),
            c => safe.push(c),
        }
    }
    safe
}

/// Describes the setup that a group of reports shares, for people.
pub(super) fn setup_of(group: &[CompareReport]) -> String {
    let first = group.first().expect("a group is not empty");
    let in_flight = match first.depth {
        1 => "One operation at a time".to_owned(),
        depth => format!("{depth} operations in flight"),
    };
    let server = match (first.cores, first.client) {
        (None, _) => "no server: the client's own CPU does the work",
        (Some(Cores::Two), Some(Client::Sleeps)) => "the server on another core, the client sleeps",
        (Some(Cores::Two), _) => "the server on another core, the client polls",
        (Some(Cores::One), _) => "the server on the same core, the client sleeps",
    };
    format!("{in_flight}; {server}")
}

fn stopped(results: &Results) -> Figure {
    let stopped = &results.stopped;
    let points = stopped.intervals.iter().map(|&(at, rate)| (at, rate)).collect();
    let curve = Curve { name: "values read".into(), points };
    let axes = [axis("seconds", Scale::Linear), axis("values read a second", Scale::Linear)];
    let marks =
        [Mark { at: stopped.stopped_at_s, text: "STOP" }, Mark { at: stopped.continued_at_s, text: "CONT" }];
    let description = "Values read a second before, while and after the node was stopped";
    let rates = [
        ("before kill -STOP", stopped.before_ops_per_s),
        ("while it is stopped", stopped.while_ops_per_s),
        ("after kill -CONT", stopped.after_ops_per_s),
    ];
    Figure {
        title: "A client keeps reading while the node is stopped",
        text: format!(
            "The memory belongs to a node, process {}, which was stopped by a signal and later continued. A connected \
             client in another process kept reading over {}, with {} reads in flight: the node's CPU is not involved.",
            stopped.pid, stopped.fabric, stopped.tasks
        ),
        pictures: vec![(String::new(), picture::curves(&[curve], axes, &marks, description))],
        table: Cells {
            heading: vec!["", "values read a second"],
            rows: rates.map(|(when, rate)| vec![when.into(), whole(rate)]).into(),
        },
        command: format!("farside demo {} --no-rivals --no-html", size_flags(results)),
    }
}

fn load(results: &Results) -> Figure {
    let curve = |fabric: &str| Curve {
        name: fabric.into(),
        points: reads_of(results, fabric).map(|run| (run.ops_per_s, run.latency_us.p50)).collect(),
    };
    let curves: Vec<Curve> = results.fabrics().into_iter().map(curve).collect();
    let axes = [axis("reads a second", Scale::Log), axis("median latency, us", Scale::Log)];
    let description = "Median latency against reads a second, a curve for each fabric";
    Figure {
        title: "Throughput against latency",
        text: format!(
            "Each curve is a fabric; its markers are {} operations in flight, from left to right. More operations in \
             flight raise the rate until a resource is saturated. Right and down is better. Both scales are \
             logarithmic.",
            list(&DEPTHS)
        ),
        pictures: vec![(String::new(), picture::curves(&curves, axes, &[], description))],
        table: Cells {
            heading: vec!["fabric", "workload", "in flight", "operations a second", "p50 us"],
            rows: run_rows(results, |run| vec![whole(run.ops_per_s), two(run.latency_us.p50)]),
        },
        command: reads_command(results),
    }
}

fn latencies(results: &Results) -> Figure {
    let percentiles = |us: &LatencyUs| [(50.0, us.p50), (95.0, us.p95), (99.0, us.p99), (99.9, us.p999)];
    let picture = |tasks: u32| {
        let curve = |run: &YcsbReport| Curve {
            name: run.fabric.clone(),
            points: percentiles(&run.latency_us).map(|(percent, us)| (nines(percent), us)).into(),
        };
        let curves: Vec<Curve> = results.reads_at(tasks).map(curve).collect();
        let axes = [axis("percentile", Scale::Percentiles), axis("latency, us", Scale::Log)];
        let title = in_flight(tasks);
        let description = format!("Percentiles of latency, {title}");
        (title, picture::curves(&curves, axes, &[], &description))
    };
    Figure {
        title: "Distribution of latencies",
        text: "Markers are p50, p95, p99 and p99.9, of one operation in 64. Lower is better, and flatter is steadier. \
               The right end of a curve mostly shows other load on this machine."
            .into(),
        pictures: ENDS.map(picture).into(),
        table: Cells {
            heading: vec!["fabric", "workload", "in flight", "p50 us", "p95 us", "p99 us", "p99.9 us", "max us"],
            rows: run_rows(results, |run| {
                let us = &run.latency_us;
                [us.p50, us.p95, us.p99, us.p999, us.max].map(two).into()
            }),
        },
        command: reads_command(results),
    }
}

fn processor_time(results: &Results) -> Figure {
    let picture = |tasks: u32| {
        let sides = |run: &YcsbReport| {
            let cpu = &run.cpu_s_per_mop;
            (run.fabric.clone(), vec![cpu.client, cpu.node.unwrap_or(0.0)])
        };
        let places: Vec<_> = results.reads_at(tasks).map(sides).collect();
        let title = in_flight(tasks);
        let description = format!("CPU seconds for a million reads, {title}");
        let label = "CPU seconds for a million reads";
        (title, picture::bars(&places, &["client", "node"], label, true, &description))
    };
    Figure {
        title: "CPU time of an operation",
        text: "On local and shm the client's own CPU does all the work. On other fabrics an engine of the node polls \
               while requests arrive, so with one operation at a time its bar is mostly waiting."
            .into(),
        pictures: ENDS.map(picture).into(),
        table: Cells {
            heading: vec!["fabric", "workload", "in flight", "client s/Mop", "node s/Mop"],
            rows: run_rows(results, |run| {
                vec![two(run.cpu_s_per_mop.client), or_dash(run.cpu_s_per_mop.node)]
            }),
        },
        command: reads_command(results),
    }
}

fn traffic(results: &Results) -> Figure {
    let runs = || results.runs.iter().filter(|run| run.tasks == u64::from(MIDDLE));
    let name = |run: &YcsbReport| format!("{}, {}", run.fabric, run.workload);
    let bytes = runs().map(|run| (name(run), vec![run.per_op.bytes_out, run.per_op.bytes_in]));
    let trips = runs().map(|run| (name(run), vec![run.per_op.round_trips]));
    let (bytes, trips): (Vec<_>, Vec<_>) = (bytes.collect(), trips.collect());
    let descriptions = ["Round trips of an operation", "Bytes of requests and replies of an operation"];
    let label = "round trips of an operation";
    Figure {
        title: "Network traffic of an operation",
        text: "Workload c reads; a is half reads and half overwrites. An operation takes one more round trip for each \
               probed slot that holds another key."
            .into(),
        pictures: vec![
            ("Round trips".into(), picture::bars(&trips, &["round trips"], label, false, descriptions[0])),
            (
                "Bytes".into(),
                picture::bars(&bytes, &["requests", "replies"], "bytes of an operation", true, descriptions[1]),
            ),
        ],
        table: Cells {
            heading: vec![
                "fabric",
                "workload",
                "in flight",
                "round trips",
                "requests",
                "bytes out",
                "bytes in",
                "atomics",
            ],
            rows: run_rows(results, |run| {
                let each = &run.per_op;
                let [trips, requests, atomics] = [each.round_trips, each.requests, each.atomics].map(two);
                vec![trips, requests, whole(each.bytes_out), whole(each.bytes_in), atomics]
            }),
        },
        command: ycsb_command(
            results,
            "workload",
            &["c".into(), "a".into()],
            &format!("--workload $workload --tasks {MIDDLE}"),
        ),
    }
}

fn floor(results: &Results) -> Figure {
    let ratio = |fabric: &str, tasks: u32| {
        let run = results.reads_at(tasks).find(|run| run.fabric == fabric);
        run.and_then(|run| results.of_floor(run)).unwrap_or(0.0)
    };
    let place = |fabric: &str| (fabric.to_owned(), ENDS.map(|tasks| ratio(fabric, tasks)).into());
    let places: Vec<_> = results.fabrics().into_iter().map(place).collect();
    let names = ENDS.map(in_flight);
    let series: Vec<&str> = names.iter().map(String::as_str).collect();
    let description = "Rate of each fabric as a share of the floor's";
    let floors = results.floors.iter().map(|floor| {
        let name = format!("by hand, {}", floor.fabric);
        vec![name, floor.workload.clone(), floor.tasks.to_string(), whole(floor.ops_per_s), "1.00".into()]
    });
    let runs =
        run_rows(results, |run| vec![whole(run.ops_per_s), results.of_floor(run).map_or("-".into(), two)]);
    Figure {
        title: "Rate compared with the machine's limit",
        text: "The floor is the same reads and overwrites without a system, in separate code: a table and items in \
               shared memory, and for ring, udp and tcp messages of the same sizes to another process. A ratio of 1 is \
               as fast as the floor. local and shm are compared with the same floor; tls with tcp's, since no floor \
               encrypts. Each workload is compared with its own floor."
            .into(),
        pictures: vec![(
            String::new(),
            picture::bars(&places, &series, "share of the floor's rate", false, description),
        )],
        table: Cells {
            heading: vec!["fabric", "workload", "in flight", "operations a second", "of the floor's rate"],
            rows: runs.into_iter().chain(floors).collect(),
        },
        command: format!(
            "for fabric in shm ring udp tcp; do\n  for tasks in {}; do\n    farside bench floor --fabric $fabric \
             --tasks $tasks \\\n      {size}\n  done\n  farside bench floor --fabric $fabric --workload a --tasks \
             {MIDDLE} \\\n    {size}\ndone",
            ENDS.map(|tasks| tasks.to_string()).join(" "),
            size = size_flags(results)
        ),
    }
}

fn comparison(results: &Results) -> Option<Figure> {
    let mut depths: Vec<u32> = results.compared.iter().map(|report| report.depth).collect();
    depths.sort_unstable();
    depths.dedup();
    let picture = |&depth: &u32| {
        let here = results.compared.iter().filter(|report| report.depth == depth);
        let mut places: Vec<_> =
            here.map(|report| (report.contender.clone(), vec![report.ops_per_s.median])).collect();
        places.sort_by(|(_, one), (_, other)| other[0].total_cmp(&one[0]));
        let title = in_flight(depth);
        let description = format!("Reads a second of each contender, {title}");
        (title, picture::bars(&places, &["reads a second"], "reads a second", false, &description))
    };
    let row = |report: &CompareReport| {
        let us = report.latency_us.as_ref();
        let cpu = report.cpu_s_per_mop;
        let spread = report.ops_per_s;
        vec![
            report.contender.clone(),
            report.depth.to_string(),
            whole(spread.median),
            format!("{} to {}", whole(spread.min), whole(spread.max)),
            or_dash(us.map(|us| us.p50)),
            or_dash(us.map(|us| us.p99)),
            or_dash(cpu.map(|cpu| cpu.client)),
            or_dash(cpu.and_then(|cpu| cpu.server)),
            or_dash(report.of_better_rival.map(|ratio| ratio.median)),
        ]
    };
    (!results.compared.is_empty()).then(|| Figure {
        title: "Comparison with rivals",
        text: format!(
            "{}; {}. All contenders have the same records, and one turn in each of {ROUNDS} rounds; a rate is the \
             median. A client polls, and its server has another core, if there is one. lmdb and farside shm have no \
             server: like farside ring and redis unix, they serve the processes of one host.",
            results.versions.join("; "),
            results.cores
        ),
        pictures: depths.iter().map(picture).collect(),
        table: Cells {
            heading: vec![
                "contender",
                "in flight",
                "reads a second",
                "least to most",
                "p50 us",
                "p99 us",
                "client s/Mop",
                "server s/Mop",
                "of the better rival",
            ],
            rows: results.compared.iter().map(row).collect(),
        },
        command: format!(
            "farside bench compare --records {} --value-size {} \\\n  --rounds {ROUNDS} --seconds {}",
            results.settings.records,
            results.settings.value_size,
            seconds(results.settings.turn())
        ),
    })
}

fn caveats(results: &Results) -> Vec<String> {
    let is_compared = !results.compared.is_empty();
    let reported = [
        Some(
            "Each number is from a short run on a machine that may have had other load: see the load average below. \
             Run the demo again before you believe a small difference, and look at ratios first.",
        ),
        Some(
            "Everything ran on one host. udp, tcp and tls used loopback; a network adds its latency for each round \
             trip of an operation.",
        ),
        Some(
            "While requests arrive, an engine of the node polls and uses a whole core. On a machine with few cores it \
             competes with the client; its cost is shown under CPU time.",
        ),
        Some(
            "The client reads in a closed loop: a read starts when the previous one has ended. Waiting times of an \
             open system are not shown; 'farside bench ycsb --target' measures them.",
        ),
        Some(
            "Except in the comparison with rivals, no process is pinned to a core. If client and engine, or a floor's \
             two processes, have to share a core, they wait for one another: a figure may then be several times worse, \
             and a fabric may look faster than its floor.",
        ),
        Some("The system reports a node's CPU time in steps of 10 ms."),
        is_compared.then_some(
            "Redis and memcached do more than PRISM-KV: types, expiry, eviction, replication. They sleep whenever they \
             are idle. LMDB is persistent, and allows one writing process at a time.",
        ),
        is_compared.then_some(
            "'of the better rival' is a contender's rate divided by that of the better of Redis and memcached in the \
             same round. A contender that serves other hosts is compared with rivals over TCP; one that serves a \
             single host, also with Redis's unix socket.",
        ),
    ];
    let build = cfg!(debug_assertions).then_some(
        "This is a development build: its figures say little about Farside. Build with 'cargo build --release'.",
    );
    build.into_iter().chain(reported.into_iter().flatten()).map(str::to_owned).collect()
}

fn machine(results: &Results) -> Cells {
    let machine = &results.machine;
    let pages = results.runs.iter().find(|run| run.fabric == "shm").and_then(|run| run.page_size);
    let cores = machine.cores.map(|cores| {
        let kind = if machine.is_virtual { " (virtual)" } else { "" };
        format!("{cores}{kind}")
    });
    let load = |load: Option<f64>| load.map(two);
    let facts = [
        ("farside", Some(format!("{}, {}", machine.release, machine.build))),
        ("date", Some(format!("{} UTC", machine.date))),
        ("processor", machine.processor.clone()),
        ("cores that it may use", cores),
        ("kernel", machine.kernel.clone()),
        ("memory", machine.memory_bytes.map(human_bytes)),
        ("pages of the node's memory", pages.map(human_bytes)),
        ("huge pages reserved", machine.huge_pages.map(|pages| pages.to_string())),
        ("load average at the start", load(machine.load_at_start)),
        ("load average at the end", load(machine.load_at_end)),
    ];
    let row = |(name, fact): (&str, Option<String>)| Some(vec![name.to_owned(), fact?]);
    Cells { heading: vec!["", "as the system reports it"], rows: facts.into_iter().filter_map(row).collect() }
}

fn axis(label: &'static str, scale: Scale) -> Axis {
    Axis { label, scale }
}

/// Returns a fabric's read-only runs, in order of their operations in flight.
fn reads_of<'a>(results: &'a Results, fabric: &'a str) -> impl Iterator<Item = &'a YcsbReport> {
    results.runs.iter().filter(move |run| run.fabric == fabric && run.workload == "c")
}

/// Returns a table row for each run: the run's fabric, workload and number of tasks, then the cells of `reported`.
fn run_rows(results: &Results, reported: impl Fn(&YcsbReport) -> Vec<String>) -> Vec<Vec<String>> {
    let which = |run: &YcsbReport| vec![run.fabric.clone(), run.workload.clone(), run.tasks.to_string()];
    results.runs.iter().map(|run| [which(run), reported(run)].concat()).collect()
}

/// Returns the demo's settings as command-line flags, to repeat a measurement.
fn size_flags(results: &Results) -> String {
    let settings = results.settings;
    format!(
        "--records {} --value-size {} --seconds {}",
        settings.records,
        settings.value_size,
        seconds(settings.each)
    )
}

/// Returns the shell command that repeats the measurement of reads.
fn reads_command(results: &Results) -> String {
    ycsb_command(results, "tasks", &DEPTHS.map(|tasks| tasks.to_string()), "--workload c --tasks $tasks")
}

fn ycsb_command(results: &Results, varied: &str, over: &[String], flags: &str) -> String {
    format!(
        "for fabric in {}; do for {varied} in {}; do\n  farside bench ycsb --fabric $fabric {flags} \\\n    \
         --distribution uniform {} \\\n    --warm-up {}ms\ndone; done",
        results.fabrics().join(" "),
        over.join(" "),
        size_flags(results),
        results.settings.warm_up().as_millis()
    )
}

fn in_flight(tasks: u32) -> String {
    match tasks {
        1 => "one at a time".into(),
        tasks => format!("{tasks} in flight"),
    }
}

fn list(numbers: &[u32]) -> String {
    let words: Vec<String> = numbers.iter().map(u32::to_string).collect();
    let (last, first) = words.split_last().expect("there is at least one number");
    format!("{} and {last}", first.join(", "))
}

fn seconds(time: Duration) -> String {
    format!("{:.3}", time.as_secs_f64()).trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn whole(number: f64) -> String {
    format!("{number:.0}")
}

fn two(number: f64) -> String {
    format!("{number:.2}")
}

fn or_dash(number: Option<f64>) -> String {
    number.map_or_else(|| "-".into(), two)
}

fn push_figure(html: &mut String, figure: &Figure) {
    html.push_str("<section>\n");
    put(html, format_args!("<h2>{}</h2>\n", escaped(figure.title)));
    paragraph(html, &figure.text);
    html.push_str("<div class=\"figures\">\n");
    for (title, picture) in &figure.pictures {
        html.push_str("<figure>");
        if !title.is_empty() {
            put(html, format_args!("<figcaption>{}</figcaption>", escaped(title)));
        }
        put(html, format_args!("{picture}</figure>\n"));
    }
    html.push_str("</div>\n<details>\n<summary>The same as a table</summary>\n");
    push_table(html, figure.title, &figure.table);
    html.push_str("</details>\n");
    put(html, format_args!("<pre><code>{}</code></pre>\n</section>\n", escaped(&figure.command)));
}

fn push_table(html: &mut String, name: &str, table: &Cells) {
    put(
        html,
        format_args!("<div class=\"table\" tabindex=\"0\" role=\"region\" aria-label=\"{}\">", escaped(name)),
    );
    html.push_str("<table>\n<thead><tr>");
    for cell in &table.heading {
        put(html, format_args!("<th scope=\"col\">{}</th>", escaped(cell)));
    }
    html.push_str("</tr></thead>\n<tbody>\n");
    for row in &table.rows {
        html.push_str("<tr>");
        for (column, cell) in row.iter().enumerate() {
            let (open, close) = if column == 0 { ("th scope=\"row\"", "th") } else { ("td", "td") };
            put(html, format_args!("<{open}>{}</{close}>", escaped(cell)));
        }
        html.push_str("</tr>\n");
    }
    html.push_str("</tbody>\n</table></div>\n");
}

fn paragraph(html: &mut String, text: &str) {
    put(html, format_args!("<p>{}</p>\n", escaped(text)));
}

fn item(html: &mut String, text: &str) {
    put(html, format_args!("<li>{}</li>\n", escaped(text)));
}

fn put(html: &mut String, text: std::fmt::Arguments<'_>) {
    html.write_fmt(text).expect("a string takes all that is written to it");
}

/// Style sheet of the page. In light and in dark mode, colours have a contrast of at least 3 with the background, and
/// text has one of at least 7.
const STYLE: &str = "
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1c2024; --soft: #4f5860; --grid: #d9dde1;
  --panel: #f4f6f8; --c1: #1b6ca8; --c2: #c2571a; --c3: #2e7d32; --c4: #7b3fa0; --c5: #a8324a; --c6: #6b6b13; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171a; --ink: #e8eaed; --soft: #aeb6bd; --grid: #363c42;
  --panel: #1e2327; --c1: #62b0ea; --c2: #f39a5f; --c3: #77c77b; --c4: #c592e6; --c5: #f0869a; --c6: #cfcf5c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
main { max-width: 70rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.7rem; line-height: 1.2; } h2 { font-size: 1.25rem; margin: 2.2rem 0 .4rem; }
p, li { max-width: 46rem; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: .5rem 0; flex: 1 1 20rem; min-width: 0; max-width: 33rem; }
figcaption { color: var(--soft); }
svg { width: 100%; height: auto; display: block; }
summary { cursor: pointer; }
.table { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th:first-child { text-align: left; } th { font-weight: 600; } tbody th { font-weight: 400; }
pre { background: var(--panel); padding: .6rem .8rem; overflow-x: auto; border-radius: .3rem; font-size: .85rem; }
pre code { user-select: all; }
";

#[cfg(test)]
mod tests;
