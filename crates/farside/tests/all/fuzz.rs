//! Fuzz targets for text from people and peers (the control plane's JSON, urls, sizes and workloads), and for the bytes
//! of Pilaf's and Chequer's requests, answers, items and records.
//!
//! Invariant: input is either parsed or refused with a reason. No input causes a panic, a block, or an unrequested
//! start of a node.

#[path = "../../../remote/tests/support/fuzz.rs"]
mod driver;

use driver::{Change, Executions, budget, change};
use farside::config::parse_bytes;
use farside::{NewStore, NodeInfo, Store, StoreStat};
use farside_bench::workload::Workload;
use farside_remote::control::{
    Accepted, Answer, Ask, Decided, Decision, Found, MemberId, MemberState, Membership, Register,
};

/// Picks a seed input and applies the changes to its bytes.
fn changed(seeds: &[Vec<u8>], seed: u8, changes: &[Change]) -> Vec<u8> {
    let mut bytes = seeds[usize::from(seed) % seeds.len()].clone();
    change(&mut bytes, changes);
    bytes
}

/// Fuzzes requests to the service of a Pilaf store, and the bytes that Pilaf's clients decode.
#[test]
fn fuzz_pilaf() {
    use farside_fabrics::local::LocalNode;
    use farside_fabrics::memory::{Mapping, Pages};
    use farside_node::host::{Host, Options};
    use farside_remote::service::address;
    use farside_systems::kv::pilaf::layout::{self, Entry, EntryState, ItemView, Op, Outcome, Request};
    use zerocopy::FromBytes;

    let executions = Executions::of("requests, items and answers of Pilaf");
    let memory = Mapping::create(16 << 20, Pages::Small).expect("memory");
    let host = Host::start(memory, farside::parts::kinds(), Options::default()).expect("a node");
    let new = NewStore { kind: "pilaf".into(), items: Some(1), ..NewStore::prism_kv("p", 8 << 20) };
    let store = host.ask(new.ask(), std::time::Duration::from_secs(10)).expect("the node has memory");
    let Answer::Store(store) = store else { panic!("not a store: {store:?}") };
    let session = LocalNode::open_session(&host).expect("a session is free");
    // Unwind safe: a panic ends the test, and nothing uses the node afterwards.
    let host = std::panic::AssertUnwindSafe(host);
    let mut item = Vec::new();
    layout::put_item(&mut item, 7, b"key", &[3; 200]);
    let entry = Entry::of_item(4096, &item);
    let request = |op, value: &[u8]| {
        let mut bytes = Vec::new();
        Request { op, key: b"key", value }.encode(&mut bytes);
        bytes
    };
    let mut answer = Vec::new();
    layout::Answer { outcome: Outcome::Done, version: farside::Version(7), value: b"value" }
        .encode(&mut answer);
    let seeds = [
        request(Op::Get, b""),
        request(Op::Put, &[5; 100]),
        request(Op::Delete, b""),
        answer,
        item,
        entry.pieces().flat_map(|(_, piece)| piece.to_vec()).collect(),
    ];
    bolero::check!().with_test_time(budget()).with_type().cloned().for_each(
        |(seed, changes): (u8, Vec<Change>)| {
            executions.one_more();
            let bytes = changed(&seeds, seed, &changes);
            if let Ok(request) = Request::decode(&bytes) {
                let mut again = Vec::new();
                request.encode(&mut again);
                assert_eq!(again, bytes, "a request is well-formed to its last byte");
            }
            let (mut asked, mut answer) = (Vec::new(), Vec::new());
            let service = address(store.extent().key, &mut asked);
            asked.extend_from_slice(&bytes);
            match host.call(session, service, &asked, &mut answer) {
                Ok(()) => drop(layout::Answer::decode(&answer).expect("an answer")),
                Err(refusal) => assert!(refusal.to_string().contains("use the same release"), "{refusal}"),
            }
            // A client decodes bytes that peers have written.
            let _answer = layout::Answer::decode(&bytes);
            if let Ok(item) = ItemView::decode(&bytes) {
                assert_eq!(layout::HEADER_SIZE + item.key.len() + item.value.len(), bytes.len());
            }
            if let Ok((entry, _)) = Entry::read_from_prefix(&bytes)
                && let EntryState::Item { len, .. } = entry.decode()
            {
                assert!(len as usize <= layout::ITEM_MAX && entry.is_sound());
            }
        },
    );
}

/// Fuzzes requests to the service of a Chequer store, the records of its table and of its log, and its description.
#[test]
fn fuzz_chequer() {
    use farside_fabrics::local::LocalNode;
    use farside_fabrics::memory::{Mapping, Pages};
    use farside_node::host::{Host, Options};
    use farside_remote::service::address;
    use farside_systems::kv::chequer::layout::{self, Block, Bucket, Record, Stamp, Table, Used};
    use farside_systems::kv::chequer::log::{self, Logged};
    use farside_systems::kv::chequer::request::{self, Outcome, PART_MAX, Request};
    use zerocopy::{FromBytes, IntoBytes};

    let executions = Executions::of("requests, records and descriptions of Chequer");
    let memory = Mapping::create(16 << 20, Pages::Small).expect("memory");
    let host = Host::start(memory, farside::parts::kinds(), Options::default()).expect("a node");
    let new = NewStore { kind: "chequer".into(), items: Some(20), ..NewStore::prism_kv("c", 2 << 20) };
    let store = host.ask(new.ask(), std::time::Duration::from_secs(10)).expect("the node has memory");
    let Answer::Store(store) = store else { panic!("not a store: {store:?}") };
    let session = LocalNode::open_session(&host).expect("a session is free");
    let table = Table::new(&store.parameters, store.extent()).expect("the node described it");
    // Unwind safe: a panic ends the test, and nothing uses the node afterwards.
    let (host, table) = (std::panic::AssertUnwindSafe(host), std::panic::AssertUnwindSafe(table));
    let encoded = |request: Request<'_>| {
        let mut bytes = Vec::new();
        request.encode(&mut bytes);
        bytes
    };
    let (key, stamp) = (&b"key"[..], Stamp::new(3, 7));
    let number = request::number_in(0, 5);
    let mut answer = Vec::new();
    let done = request::Answer::of(Outcome::Done);
    request::Answer { stamp, first: 5, second: 6, value: b"value", ..done }.encode(&mut answer);
    let mut logged = Vec::new();
    log::begin_put(&mut logged, stamp, key, 1, 3);
    layout::put_block(&mut logged, key, b"value");
    let block = Block { at: table.area(0).start, len: 13 };
    let used = Used { key: table.key_field(key), block, crc_value: 5, stamp };
    let seeds = [
        encoded(Request::Get { key, offset: 0, stamp: Stamp(0) }),
        encoded(Request::Contains { key }),
        encoded(Request::Put { key, value: &[5; 100] }),
        encoded(Request::Delete { key }),
        encoded(Request::Reserve { key, number, len: 2000, crc: 7 }),
        encoded(Request::Write { number, offset: 3, bytes: b"bytes" }),
        encoded(Request::Commit { number }),
        encoded(Request::Withdraw { number }),
        answer,
        logged,
        Record::used(used).as_bytes().to_vec(),
        store.parameters.clone().into_bytes(),
    ];
    bolero::check!().with_test_time(budget()).with_type().cloned().for_each(
        |(seed, changes): (u8, Vec<Change>)| {
            executions.one_more();
            let bytes = changed(&seeds, seed, &changes);
            if let Ok(request) = Request::decode(&bytes) {
                assert_eq!(encoded(request), bytes, "a request is well-formed to its last byte");
            }
            let (mut asked, mut answer) = (Vec::new(), Vec::new());
            let service = address(store.extent().key, &mut asked);
            asked.extend_from_slice(&bytes);
            match host.call(session, service, &asked, &mut answer) {
                Ok(()) => {
                    let answer = request::Answer::decode(&answer).expect("an answer");
                    assert!(answer.value.len() <= PART_MAX);
                }
                Err(refusal) => assert!(refusal.to_string().contains("use the same release"), "{refusal}"),
            }
            // A client decodes bytes that peers have written, and a node those of its log.
            let _answer = request::Answer::decode(&bytes);
            if let Ok(Logged { block: Some(block), key, .. }) = Logged::decode(&bytes) {
                assert!(layout::value_in(block, key).is_some());
            }
            if let Ok((record, _)) = Record::read_from_prefix(&bytes)
                && let Bucket::Used(used) = record.decode()
            {
                assert!(used.block.len as usize <= layout::BLOCK_MAX);
            }
            if let Ok(table) = Table::new(&String::from_utf8_lossy(&bytes), store.extent()) {
                let home = table.home(key);
                let last = table.spec().partitions - 1;
                assert!(home.partition <= last && table.area(last).end <= store.table_at + store.table_len);
                for step in 0..table.probes() {
                    let end = table.bucket_of(home, step) + table.spec().block_buckets;
                    assert!(table.bucket_at(home.partition, end) <= table.area(home.partition).start);
                }
            }
        },
    );
}

/// Sends changed requests about members to a node. The node answers each of them, and what it says about its members
/// afterwards is well-formed.
#[test]
fn fuzz_members() {
    use farside_fabrics::memory::{Mapping, Pages};
    use farside_node::host::{Host, Options};
    use std::time::Duration;

    let executions = Executions::of("requests to a node about members");
    let memory = Mapping::create(16 << 20, Pages::Small).expect("memory");
    let host = Host::start(memory, farside::parts::kinds(), Options::default()).expect("a node");
    let ask = |request: Ask| host.ask(request, Duration::from_secs(10));
    let Ok(Answer::NodeInfo(NodeInfo { incarnation, .. })) = ask(Ask::NodeInfo) else { panic!("a node") };
    let (name, attempt) = (|| "m".to_owned(), [1, 2]);
    let id = |node, incarnation| MemberId { node, incarnation };
    let members = || vec![id(0, incarnation), id(1, 7), id(2, 8)];
    let next = || vec![id(0, incarnation), id(1, 7), id(3, 9)];
    let membership =
        |state, configuration, members| Membership { attempt, state, index: 0, configuration, members };
    let prepare = |membership| Ask::PrepareStore {
        name: name(),
        kind: "prism-rs".into(),
        parameters: r#"{"block":512,"blocks":9}"#.into(),
        quota: 2 << 20,
        membership,
    };
    let created = [
        prepare(membership(MemberState::Prepared, 1, members())),
        Ask::Decide { name: name(), attempt, decision: Decision::Commit },
    ];
    let seeds: Vec<Vec<u8>> = [
        Ask::Promise { name: name(), attempt, configuration: 2, ballot: [1, 3] },
        Ask::Accept { name: name(), attempt, configuration: 2, ballot: [1, 3], members: next() },
        Ask::Revoke { name: name(), attempt, configuration: 1 },
        Ask::Enable { name: name(), attempt, configuration: 2, members: next() },
        Ask::Leave { name: name(), membership: membership(MemberState::Committed, 1, members()) },
        prepare(membership(MemberState::Joining, 2, next())),
        Ask::Decide { name: name(), attempt, decision: Decision::Drop },
    ]
    .iter()
    .chain(&created)
    .map(|request| serde_json::to_vec(request).expect("plain data"))
    .collect();
    // Unwind safe: a panic ends the test, and nothing uses the node afterwards.
    let host = std::panic::AssertUnwindSafe(&host);
    bolero::check!().with_test_time(budget()).with_type().cloned().for_each(
        |(seed, changes): (u8, Vec<Change>)| {
            executions.one_more();
            let bytes = changed(&seeds, seed, &changes);
            let Ok(request) = serde_json::from_slice::<Ask>(&bytes) else { return };
            let ask = |request: Ask| host.ask(request, Duration::from_secs(10));
            if let Err(refusal) = ask(request) {
                assert!(!refusal.to_string().is_empty());
            }
            let Ok(Answer::Stores(stores)) = ask(Ask::ListStores) else { panic!("the node answers") };
            for store in &stores {
                let Some(of) = &store.membership else { continue };
                assert_eq!(of.check(incarnation), Ok(()), "{of:?}");
                match ask(Ask::FindStore { name: store.name.clone() }) {
                    Ok(Answer::Found(Found { accepted, .. })) => {
                        assert!(accepted.is_none_or(|accepted| accepted.check().is_ok()));
                    }
                    other => panic!("asked for a store, got {other:?}"),
                }
            }
            // The next input finds the same store again, and memory for others.
            if stores.len() > 3 || !stores.iter().any(|store| store.name == "m") {
                for store in stores {
                    let of = store.membership.map_or([0; 2], |of| of.attempt);
                    let dropped =
                        ask(Ask::Decide { name: store.name, attempt: of, decision: Decision::Drop });
                    assert!(dropped.is_ok(), "{dropped:?}");
                }
                for request in &created {
                    ask(request.clone()).expect("the node has memory");
                }
            }
        },
    );
}

#[test]
fn fuzz_control() {
    let executions = Executions::of("requests and answers of the control plane");
    let name = || "default".to_owned();
    let membership = || {
        let members = (1..3).map(|id| MemberId { node: id, incarnation: id.into() }).collect();
        let state = MemberState::Prepared;
        Membership { attempt: [1, 2], state, index: 0, configuration: 1, members }
    };
    let asks = [
        NewStore::prism_kv("s", 8 << 20).ask(),
        Ask::DropStore { name: name() },
        Ask::OpenStore { name: name() },
        Ask::ListStores,
        Ask::StoreStat { name: name() },
        Ask::NodeInfo,
        Ask::Scan { name: name() },
        Ask::FindStore { name: name() },
        Ask::Decide { name: name(), attempt: [1, 2], decision: Decision::Commit },
        Ask::PrepareStore {
            name: name(),
            kind: "prism-kv".into(),
            parameters: "{}".into(),
            quota: 2 << 20,
            membership: membership(),
        },
        Ask::Bind { name: name(), id: u64::MAX, client: 7, nonce: 1 << 63 },
        Ask::Fence { name: name(), id: 1, nonce: 2 },
        Ask::Wall { name: name(), id: u64::MAX },
        Ask::Promise { name: name(), attempt: [1, 2], configuration: 2, ballot: [1, u64::MAX] },
        Ask::Accept {
            name: name(),
            attempt: [1, 2],
            configuration: 2,
            ballot: [1, 3],
            members: membership().members,
        },
        Ask::Revoke { name: name(), attempt: [1, 2], configuration: 1 },
        Ask::Enable { name: name(), attempt: [1, 2], configuration: 2, members: membership().members },
        Ask::Leave { name: name(), membership: membership() },
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
        table_len: 1072,
        wide: false,
        created: 1 << 50,
        id: 0,
        former: None,
        membership: None,
    };
    let member = Store { membership: Some(membership()), ..store.clone() };
    let accepted = Accepted { ballot: [1, 2], members: membership().members };
    let blocks = Store {
        kind: "prism-rs".into(),
        parameters: r#"{"block":512,"blocks":9,"writers":4,"stripe":{"volume":7,"index":1,"count":2}}"#
            .into(),
        ..store.clone()
    };
    let answers = [
        Answer::Done,
        Answer::Store(store.clone()),
        Answer::Store(blocks),
        Answer::Stores(vec![store.clone(), store]),
        Answer::StoreStat(StoreStat::default()),
        Answer::NodeInfo(NodeInfo::default()),
        Answer::Decided(Decided { incarnation: 1, state: MemberState::Committed }),
        Answer::Found(Found { incarnation: 1, store: Some(member), accepted: Some(accepted.clone()) }),
        Answer::Register(Register { promised: [2, 1], accepted: Some(accepted) }),
        Answer::Wall(u64::MAX),
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
                let table =
                    farside_systems::blocks::prism_rs::layout::Table::new(&store.parameters, store.extent());
                if let Ok(table) = table {
                    let last = table.register(table.spec.blocks - 1).raw();
                    assert!(last + 16 <= store.table_at + store.table_len, "a register lies in its table");
                }
                let table =
                    farside_systems::blocks::abd_lock::layout::Table::new(&store.parameters, store.extent());
                if let Ok(table) = table {
                    let len = table.spec.table_len().expect("it was checked");
                    assert!(len <= store.table_len, "the blocks lie in their table");
                }
                if let Some(shape) = farside_systems::blocks::stripe::Shape::of(&store.parameters) {
                    assert!(shape.blocks.checked_mul(shape.block.into()).is_some_and(|bytes| bytes > 0));
                    assert!(shape.stripe.is_none_or(|stripe| stripe.index < stripe.count));
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

/// Fuzzes only urls without `//` and `local:`, because others would connect to a server or start a node.
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
            let reaches_nothing = !text.contains("//") && !text.starts_with("local:");
            if reaches_nothing {
                executions.one_more();
                let error = farside::connect(text).expect_err("no node serves there");
                assert!(!error.to_string().is_empty());
            }
        },
    );
}

#[test]
fn fuzz_workloads() {
    let executions = Executions::of("workloads");
    let seeds = [
        &include_bytes!("../../../../workloads/workloada")[..],
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

/// Fuzzes descriptions of protocols for `tear`, and searches those that are well-formed.
#[test]
fn fuzz_tear() {
    use farside_trial::tear::{Description, Protocol, Search, search, story};
    use std::rc::Rc;

    /// Size in bytes of the objects that are searched. Larger ones take more time than their bytes are worth.
    const SIZE_MAX: usize = 256;

    let executions = Executions::of("descriptions of protocols");
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/tear");
    let entries =
        std::fs::read_dir(folder).expect("the examples").map(|entry| entry.expect("an entry").path());
    let mut paths: Vec<_> = entries.collect();
    paths.sort();
    let seeds: Vec<Vec<u8>> = paths.into_iter().map(|path| std::fs::read(path).expect("text")).collect();
    bolero::check!().with_test_time(budget()).with_type().cloned().for_each(
        |(seed, changes, relaxed): (u8, Vec<Change>, bool)| {
            executions.one_more();
            let text = String::from_utf8_lossy(&changed(&seeds, seed, &changes)).into_owned();
            let protocol = match Description::parse(&text) {
                Ok(protocol) => Rc::new(protocol),
                Err(unusable) => {
                    assert!(unusable.reason.contains(": "), "a remedy follows the reason: {unusable}");
                    return;
                }
            };
            if protocol.shape().start.len() > SIZE_MAX {
                return;
            }
            let (coverage, found) = search(&protocol, &Search { seed: 1, schedules: 2, relaxed });
            assert!((1..=2).contains(&coverage.schedules));
            if let Some(found) = found {
                let lines = story::tell(&*protocol, protocol.accept(), &found.plan, &found.ran);
                assert!(!lines.is_empty() && !story::table(&lines).is_empty());
            }
        },
    );
}
