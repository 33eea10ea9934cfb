//! `figure` and `whatif`: their output for people and scripts, and their refusals.

use crate::support::farside;

#[test]
fn a_figure_is_printed_as_text_and_json_and_drawn() {
    let folder = tempfile::tempdir().expect("a folder");
    let [csv, svg] = ["figure.csv", "figure.svg"].map(|name| folder.path().join(name).display().to_string());
    let reported = farside(["figure", "prism-2", "--csv", &csv, "--svg", &svg]).done();
    assert!(
        reported.text().contains("data-centre") && !reported.text().contains("NO,"),
        "{}",
        reported.text()
    );
    let csv = std::fs::read_to_string(csv).expect("it was written");
    assert!(
        csv.starts_with("curve,source,network,") && csv.contains("prism-sw,published,cluster,8.1"),
        "{csv}"
    );
    assert!(std::fs::read_to_string(svg).expect("it was drawn").contains("</svg>"));
    let lines = farside(["figure", "prism-3", "--operations", "1000", "--json"]).done();
    let peak = lines.text().lines().find(|line| line.contains(r#""point":"peak""#)).expect("a peak");
    let peak: serde_json::Value = serde_json::from_str(peak).expect("JSON");
    assert_eq!((&peak["figure"], &peak["unit"]), (&"prism-3".into(), &"M/s".into()));
    assert_eq!((&peak["published"], &peak["is_met"]), (&8.2.into(), &true.into()));
    farside(["figure", "prism-8"]).refused("name one of prism-1");
    // Refused before the prediction starts, which would take minutes.
    for file in [["--csv", "/nowhere/figure.csv"], ["--svg", "/"]] {
        let figure = ["figure", "prism-4", "--operations", "10000000"];
        farside(figure.iter().chain(&file)).refused("name a file that can be written");
    }
}

/// Measures a figure over a fabric in two rounds, and returns the JSON line of each ratio.
fn measured(figure: &str, fabric: &str, more: &[&str]) -> Vec<serde_json::Value> {
    let asked = ["figure", figure, "--fabric", fabric, "--rounds", "2", "--json"];
    let lines = farside(asked.iter().chain(more)).done();
    let lines: Vec<serde_json::Value> =
        lines.text().lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    for line in &lines {
        assert_eq!(
            (&line["figure"], &line["fabric"], &line["rounds"]),
            (&figure.into(), &fabric.into(), &2.into())
        );
        for field in ["of_median", "to_median", "ratio", "ratio_lower", "ratio_upper"] {
            assert!(line[field].as_f64() > Some(0.0), "{field}: {line}");
        }
        assert!(line["ratio_lower"].as_f64() <= line["ratio"].as_f64(), "{line}");
        assert!(line["ratio"].as_f64() <= line["ratio_upper"].as_f64(), "{line}");
        assert_eq!(line.as_object().expect("an object").len(), 15, "scripts rely on these fields: {line}");
    }
    lines
}

/// Returns the values of these fields of a JSON line, as text.
fn texts<const FIELDS: usize>(line: &serde_json::Value, fields: [&str; FIELDS]) -> [String; FIELDS] {
    fields.map(|field| line[field].as_str().expect("text").to_owned())
}

#[test]
fn stores_are_compared_on_a_fabric_by_ratios() {
    let folder = tempfile::tempdir().expect("a folder");
    let [csv, svg] = ["figure.csv", "figure.svg"].map(|name| folder.path().join(name).display().to_string());
    let few = ["--records", "1000", "--clients", "3", "--csv", &csv, "--svg", &svg];
    for (figure, fabric) in [("prism-3", "local"), ("prism-3", "udp"), ("prism-4", "udp")] {
        let ratios = measured(figure, fabric, &few);
        assert_eq!(ratios.len(), 4, "with 1, 2 and 3 clients, and at the peak");
        for (line, quantity) in ratios.iter().zip(["latency", "latency", "latency", "throughput"]) {
            let reported = texts(line, ["distance", "of", "to", "quantity"]);
            assert_eq!(reported, ["rack", "PRISM-KV", "Pilaf", quantity], "{line}");
        }
        assert_eq!(ratios[0]["point"], "with 1 client");
        // The paper has no curve for chains that the client's CPU runs.
        let published = [&ratios[0], &ratios[1], &ratios[3]].map(|line| line["published"].is_number());
        assert_eq!(published, [fabric == "udp", false, fabric == "udp"]);
        let csv = std::fs::read_to_string(&csv).expect("it was written");
        assert!(
            csv.starts_with("curve,source,throughput / Pilaf's peak,latency / Pilaf's at low load\n"),
            "{csv}"
        );
        assert_eq!(csv.matches(",measured,").count(), 6, "both systems, three times: {csv}");
        assert_eq!(csv.contains(",published,"), fabric == "udp", "{csv}");
        assert!(std::fs::read_to_string(&svg).expect("it was drawn").contains("</svg>"));
    }
}

#[test]
fn stores_are_compared_on_a_fabric_at_each_length_of_values() {
    let folder = tempfile::tempdir().expect("a folder");
    let csv = folder.path().join("figure.csv").display().to_string();
    let ratios = measured("chequer-8", "udp", &["--clients", "4", "--csv", &csv]);
    let reported: Vec<_> = ratios.iter().map(|line| texts(line, ["point", "of", "to", "quantity"])).collect();
    let lengths = ["64 B", "1 KiB", "64 KiB"];
    let expected = ["Zipf", "uniform"].iter().flat_map(|keys| lengths.map(|len| format!("{len}, {keys}")));
    let expected =
        expected.map(|point| [&*point, "Chequer", "Chequer-message", "throughput"].map(str::to_owned));
    assert!(expected.eq(reported.iter().cloned()), "{reported:?}");
    let published: Vec<_> = ratios.iter().map(|line| line["published"].as_f64()).collect();
    assert_eq!(published, [Some(2.0), None, Some(1.3), Some(2.0), None, Some(1.3)]);
    let csv = std::fs::read_to_string(&csv).expect("it was written");
    assert_eq!(csv.matches(",measured,").count(), 6, "three lengths, twice: {csv}");
}

#[test]
fn ops_are_compared_on_a_fabric_by_ratios() {
    for fabric in ["shm", "ring"] {
        let ops = measured("prism-1", fabric, &[]);
        let reported = ops.iter().map(|line| texts(line, ["of", "to", "distance"]));
        let expected = ["WRITE", "indirect READ", "ALLOCATE", "enhanced CAS"];
        assert!(reported.eq(expected.map(|op| [op, "READ", "direct"].map(str::to_owned))), "{ops:?}");
        assert!(ops.iter().all(|line| line["published"].is_number()), "{ops:?}");
    }
    let far = measured("prism-2", "local", &[]);
    let reported: Vec<_> = far.iter().map(|line| texts(line, ["point", "of", "to"])).collect();
    let expected =
        ["rack", "cluster", "data-centre"].map(|far| [far, "indirect READ", "2 x READ"].map(str::to_owned));
    assert_eq!(reported, expected);
    let least: Vec<_> = far.iter().map(|line| line["to_median"].as_f64().expect("a number")).collect();
    assert!(
        least[0] >= 1.2 && least[1] >= 6.0 && least[2] >= 48.0,
        "two reads take at least two round trips: {least:?}"
    );
    let one = measured("prism-2", "udp", &["--distance", "cluster"]);
    assert_eq!(one.iter().map(|line| texts(line, ["distance"])).collect::<Vec<_>>(), [["cluster"]]);
    let people = farside(["figure", "prism-1", "--fabric", "local", "--rounds", "2"]).done();
    assert!(people.text().contains("only ratios are compared"), "{}", people.text());
}

#[test]
fn invalid_measurements_of_figures_are_refused_with_a_remedy() {
    let wrong: [(&[&str], &str); 13] = [
        (&["chequer-modes", "--fabric", "udp"], "omit --fabric to have the figure predicted"),
        (&["chequer-blocks", "--fabric", "udp"], "omit --fabric to have the figure predicted"),
        (&["prism-3", "--fabric", "frob"], "name sim or one of local, shm, udp"),
        (&["prism-3", "--fabric", ""], "name sim or one of local, shm, udp"),
        (&["synchronization-4", "--fabric", "udp"], "omit --fabric to have the figure predicted"),
        (&["prism-3", "--fabric", "udp", "--distance", "moon"], "name one of direct, rack"),
        (&["prism-3", "--fabric", "udp", "--operations", "5000"], "give --rounds instead"),
        (&["prism-3", "--fabric", "udp", "--rounds", "0"], "--rounds"),
        (&["prism-3", "--fabric", "udp", "--clients", "65"], "1..=64"),
        (
            &["prism-1", "--fabric", "udp", "--clients", "2"],
            "measure prism-3, prism-4, chequer-7 or chequer-8",
        ),
        (
            &["prism-2", "--fabric", "udp", "--records", "2000"],
            "measure prism-3, prism-4, chequer-7 or chequer-8",
        ),
        (&["prism-3", "--distance", "rack"], "name a fabric, for example --fabric udp"),
        (&["prism-3", "--fabric", "sim", "--rounds", "3"], "name a fabric, for example --fabric udp"),
    ];
    for (arguments, reason) in wrong {
        farside(["figure"].iter().chain(arguments)).refused(reason);
    }
}

#[test]
fn whatif_reports_each_platform_and_network() {
    let asked = ["whatif", "--system", "pilaf", "--workload", "reads=0.5,value=64", "--operations", "1000"];
    let lines = farside(asked.into_iter().chain(["--json"])).done();
    let answers: Vec<serde_json::Value> =
        lines.text().lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(answers.len(), 16, "four platforms, four networks");
    let [near, far] = ["direct", "data-centre"].map(|network| {
        let answer = answers
            .iter()
            .find(|answer| (&answer["platform"], &answer["network"]) == (&"rdma".into(), &network.into()));
        answer.expect("both networks are reported")["low_load_us"].as_f64().expect("a number")
    });
    // Half of the operations take two round trips, half take one.
    assert!((far - near - 1.5 * 24.0).abs() < 2.0, "{near} us near, {far} us far");
}

/// A GET of FaRM-KV takes one round trip, and reads 8 slots. One with a cached index takes one or two.
#[test]
fn whatif_takes_the_rivals_whose_gets_are_one_read() {
    let answer = |system: &str| {
        let asked =
            ["whatif", "--system", system, "--workload", "value=64", "--operations", "1000", "--json"];
        let lines = farside(asked).done();
        let first = lines.text().lines().next().expect("the first platform").to_owned();
        let answer: serde_json::Value = serde_json::from_str(&first).expect("JSON");
        assert_eq!((&answer["system"], &answer["platform"]), (&system.into(), &"rdma".into()));
        ["round_trips", "bytes_out"].map(|field| answer[field].as_f64().expect("a number"))
    };
    let ([farm, of_farm], [cached, of_cached]) = (answer("farm-kv"), answer("cached-index"));
    assert_eq!(farm, 1.0);
    assert!((1.0..=2.0).contains(&cached), "{cached} round trips");
    assert!(of_farm > 8.0 * 64.0 && of_farm > 2.0 * of_cached, "{of_farm} bytes, and {of_cached}");
}

/// A call takes one round trip, and its response has the bytes of the value.
#[test]
fn whatif_takes_calls() {
    let answer = |value: &str| {
        let asked = ["whatif", "--system", "rpc-echo", "--workload", value, "--operations", "1000", "--json"];
        let lines = farside(asked).done();
        let first = lines.text().lines().next().expect("the first platform").to_owned();
        serde_json::from_str::<serde_json::Value>(&first).expect("JSON")
    };
    let [short, long, sent] = ["value=32", "value=896", "reads=0,value=896"].map(answer);
    assert_eq!((&short["platform"], &short["round_trips"]), (&"rdma".into(), &1.0.into()));
    let bytes = |of: &serde_json::Value, field: &str| of[field].as_f64().expect("a number");
    assert_eq!(bytes(&long, "bytes_out") - bytes(&short, "bytes_out"), 896.0 - 32.0);
    assert_eq!(bytes(&long, "bytes_in"), bytes(&short, "bytes_in"));
    assert_eq!(bytes(&sent, "bytes_in") - bytes(&long, "bytes_in"), 896.0 - 8.0);
}

/// A transaction that reads a key of FaSST is one call, and one that updates it takes three: lock+get, log, commit.
#[test]
#[ignore = "takes minutes of simulated load: cargo xtask soak"]
fn soak_whatif_takes_fassts_transactions() {
    let trips = |reads: &str| {
        let asked =
            ["whatif", "--system", "fasst", "--keys", "1", "--workload", reads, "--operations", "1000"];
        let lines = farside(asked.into_iter().chain(["--json"])).done();
        let first = lines.text().lines().next().expect("the first platform").to_owned();
        let answer: serde_json::Value = serde_json::from_str(&first).expect("JSON");
        answer["round_trips"].as_f64().expect("a number")
    };
    let [read, update] = ["reads=1,value=64", "reads=0,value=64"].map(trips);
    assert!((read - 1.0).abs() < 0.02 && (update - 3.0).abs() < 0.05, "{read} and {update} round trips");
}

/// Chequer's GETs need no core of the node, so a message to one is what Chequer-message pays on every platform.
#[test]
#[ignore = "takes minutes of simulated load: cargo xtask soak"]
fn soak_whatif_takes_chequer_and_values_of_several_lengths() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("workload").display().to_string();
    let answer = |system: &str, more: &str| {
        let text = format!("readproportion=1\nupdateproportion=0\nfieldcount=1\nfieldlength=1000\n{more}");
        std::fs::write(&file, text).expect("a file");
        let asked = ["whatif", "--system", system, "--workload", &file, "--operations", "1000", "--json"];
        let lines = farside(asked).done();
        let rdma = lines.text().lines().next().expect("the first platform").to_owned();
        serde_json::from_str::<serde_json::Value>(&rdma).expect("JSON")
    };
    let [chequer, message] = ["chequer", "chequer-message"].map(|system| answer(system, ""));
    assert_eq!((&chequer["platform"], &chequer["round_trips"]), (&"rdma".into(), &2.0.into()));
    assert_eq!(message["round_trips"], 1.0);
    let short = answer("chequer", "fieldlengthdistribution=uniform");
    let [all, half] = [&chequer, &short].map(|answer| answer["bytes_out"].as_f64().expect("a number"));
    assert!((400.0..600.0).contains(&(all - half)), "values are half as long: {all} and {half} bytes");
}

#[test]
fn whatif_refuses_questions_outside_its_model() {
    let wrong: [(&[&str], &str); 10] = [
        (&["--workload", "reads=2"], "give 0 to 1"),
        (&["--workload", "value=0"], "is not a length of a value"),
        (&["--workload", "writes=1"], "write it like reads=0.95,value=512"),
        (&["--workload", "nowhere"], "built in are a, b, c, d, e and f"),
        (
            &["--system", "redis"],
            "name prism-kv, pilaf, farm-kv, cached-index, chequer, chequer-message, prism-rs, abd-lock, prism-tx, \
             farm, fasst, latch or rpc-echo",
        ),
        (&["--system", "abd-lock", "--workload", "value=100"], "give a multiple of 512 up to 32768"),
        (&["--system", "rpc-echo", "--workload", "value=5000"], "give one length from 8 to 4032"),
        (&["--link", "0"], "--link"),
        (&["--system", "pilaf", "--keys", "2"], "pilaf has no transactions: omit --keys"),
        (
            &["--system", "prism-tx", "--keys", "4", "--workload", "value=32000"],
            "no transactions that write 4 values of 32000 bytes: give fewer keys, or shorter values",
        ),
    ];
    for (arguments, reason) in wrong {
        farside(["whatif"].iter().chain(arguments)).refused(reason);
    }
}
