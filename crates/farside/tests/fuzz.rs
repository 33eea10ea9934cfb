//! Fuzz targets of what people and peers write as text: the control plane's JSON, urls, sizes, and workloads.
//!
//! Held: it is refused with a reason, or understood; nothing panics, waits or starts anything that was not named.

#[path = "../../remote/tests/support/fuzz.rs"]
mod fuzz;

use farside::config::parse_bytes;
use farside::{NewStore, NodeInfo, Store, StoreStat};
use farside_bench::workload::Workload;
use farside_remote::control::{Answer, Ask};
use fuzz::{Change, Executions, budget, change};

/// One of the seeds, changed.
fn changed(seeds: &[Vec<u8>], seed: u8, changes: &[Change]) -> Vec<u8> {
    let mut bytes = seeds[usize::from(seed) % seeds.len()].clone();
    change(&mut bytes, changes);
    bytes
}

#[test]
fn fuzz_control() {
    let executions = Executions::of("questions and answers of the control plane");
    let name = || "default".to_owned();
    let asks = [
        NewStore::prism_kv("s", 8 << 20).ask(),
        Ask::DropStore { name: name() },
        Ask::OpenStore { name: name() },
        Ask::ListStores,
        Ask::StoreStat { name: name() },
        Ask::NodeInfo,
        Ask::Scan { name: name() },
    ];
    let store = Store {
        name: name(),
        kind: "prism-kv".into(),
        parameters: r#"{"slots":64,"seed":3,"placement":"hashed","epoch":0}"#.into(),
        quota: 1 << 20,
        incarnation: 1,
        region: 2,
        secret: 3,
        table_at: 4096,
        table_len: 1024,
        wide: false,
    };
    let answers = [
        Answer::Done,
        Answer::Store(store.clone()),
        Answer::Stores(vec![store.clone(), store]),
        Answer::StoreStat(StoreStat::default()),
        Answer::NodeInfo(NodeInfo::default()),
    ];
    let json = |value: Result<Vec<u8>, serde_json::Error>| value.expect("plain data");
    let seeds: Vec<Vec<u8>> = asks
        .iter()
        .map(|ask| json(serde_json::to_vec(ask)))
        .chain(answers.iter().map(|answer| json(serde_json::to_vec(answer))))
        .collect();
    bolero::check!().with_test_time(budget()).with_type().cloned().for_each(
        |(seed, changes): (u8, Vec<Change>)| {
            executions.one_more();
            let bytes = changed(&seeds, seed, &changes);
            if let Ok(ask) = serde_json::from_slice::<Ask>(&bytes) {
                let again = serde_json::to_vec(&ask).expect("plain data");
                assert_eq!(serde_json::from_slice::<Ask>(&again).expect("as it was written"), ask);
            }
            if let Ok(Answer::Store(store)) = serde_json::from_slice::<Answer>(&bytes) {
                let table =
                    farside_systems::kv::prism_kv::layout::Table::new(&store.parameters, store.extent());
                if let Ok(table) = table {
                    let end = store.table_at + store.table_len;
                    for index in table.probe(b"a key") {
                        let at = table.slot_at(index).raw();
                        assert!(at >= store.table_at && at + 16 <= end, "a slot lies in its table");
                    }
                }
            }
        },
    );
}

#[test]
fn fuzz_sizes() {
    let executions = Executions::of("sizes");
    let seeds =
        ["65536", "64KiB", " 2GiB ", "1tib", "18446744073709551615", "17179869184k", "0x10", "-1", "ſKİ"]
            .map(|text| text.as_bytes().to_vec());
    bolero::check!().with_test_time(budget()).with_type().cloned().for_each(
        |(seed, changes): (u8, Vec<Change>)| {
            executions.one_more();
            let bytes = changed(&seeds, seed, &changes);
            let text = String::from_utf8_lossy(&bytes);
            match parse_bytes(&text) {
                Ok(size) => assert_eq!(parse_bytes(&size.to_string()), Ok(size)),
                Err(reason) => assert!(reason.contains("write it like")),
            }
        },
    );
}

/// Only such urls as lead nowhere: others would be connected to, or memory would be lent.
#[test]
fn fuzz_urls() {
    let executions = Executions::of("urls");
    let seeds =
        ["udp://[::1]:7460/", "tcp://127.0.0.1:0", "ring:/x", "shm:", "local:1x", "verbs://x", "udp:", "a,b"]
            .map(|text| text.as_bytes().to_vec());
    bolero::check!().with_test_time(budget()).with_type().cloned().for_each(
        |(seed, changes): (u8, Vec<Change>)| {
            let bytes = changed(&seeds, seed, &changes);
            let Ok(text) = std::str::from_utf8(&bytes) else { return };
            let leads_nowhere = !text.contains("//") && !text.starts_with("local:");
            if leads_nowhere {
                executions.one_more();
                let error = farside::connect(text).expect_err("nobody serves there");
                assert!(!error.to_string().is_empty());
            }
        },
    );
}

#[test]
fn fuzz_workloads() {
    let executions = Executions::of("workloads");
    let seeds = [
        &include_bytes!("../../../workloads/workloada")[..],
        b"recordcount=1000\noperationcount=0\nreadproportion=0.5\nupdateproportion=0.5\nrequestdistribution=zipfian\n",
        b"recordcount : 9223372036854775807\nreadproportion 1e308\ninsertproportion=NaN\nrequestdistribution=hotspot\n",
        b"a\\\n b=\\u0041\\\nhotspotdatafraction=-1\n#\n!\nscanproportion=inf\n",
    ]
    .map(<[u8]>::to_vec);
    bolero::check!().with_test_time(budget()).with_type().cloned().for_each(
        |(seed, changes): (u8, Vec<Change>)| {
            executions.one_more();
            let bytes = changed(&seeds, seed, &changes);
            match Workload::parse("fuzz", &String::from_utf8_lossy(&bytes)) {
                Ok(workload) => {
                    assert!(workload.records > 0);
                    let _chooser = workload.chooser();
                }
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        },
    );
}
