//! Predictions: what scripts read of them.

use crate::support::farside;

#[test]
fn a_figure_is_told_to_people_and_to_scripts_and_drawn() {
    let folder = tempfile::tempdir().expect("a folder");
    let [csv, svg] = ["figure.csv", "figure.svg"].map(|name| folder.path().join(name).display().to_string());
    let told = farside(["figure", "prism-2", "--csv", &csv, "--svg", &svg]).done();
    assert!(told.text().contains("data-centre") && !told.text().contains("NO,"), "{}", told.text());
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
    farside(["figure", "prism-9"]).refused("name one of prism-1");
    farside(["figure", "prism-1", "--csv", "/nowhere/figure.csv"]).refused("name a file that can be written");
}

#[test]
fn whatif_tells_each_platform_and_network() {
    let asked = ["whatif", "--system", "pilaf", "--workload", "reads=0.5,value=64", "--operations", "1000"];
    let lines = farside(asked.iter().chain(&["--json"])).done();
    let answers: Vec<serde_json::Value> =
        lines.text().lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(answers.len(), 16, "four platforms, four networks");
    let [near, far] = ["direct", "data-centre"].map(|network| {
        let answer = answers
            .iter()
            .find(|answer| (&answer["platform"], &answer["network"]) == (&"rdma".into(), &network.into()));
        answer.expect("both are told")["low_load_us"].as_f64().expect("a number")
    });
    // Half of the operations take two round trips, and half take one.
    assert!((far - near - 1.5 * 24.0).abs() < 2.0, "{near} us near, {far} us far");
    let table = farside(asked).done();
    assert!(table.text().contains("bluefield") && table.text().lines().count() == 18, "{}", table.text());
}

#[test]
fn whatif_refuses_what_it_has_no_model_of() {
    let wrong: [(&[&str], &str); 6] = [
        (&["--workload", "reads=2"], "give 0 to 1"),
        (&["--workload", "value=0"], "is no length of a value"),
        (&["--workload", "writes=1"], "write it like reads=0.95,value=512"),
        (&["--workload", "nowhere"], "built in are a, b and c"),
        (&["--system", "redis"], "name prism-kv or pilaf"),
        (&["--link", "0"], "--link"),
    ];
    for (arguments, reason) in wrong {
        farside(["whatif"].iter().chain(arguments)).refused(reason);
    }
}
