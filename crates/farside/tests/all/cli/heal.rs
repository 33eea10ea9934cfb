//! `heal` and `serve --heal`: stores that a dead client left unfinished, over the processes of several nodes.

use crate::support::{Process, farside, serve, until};
use farside_fabrics::executor::block_on;
use farside_remote::control::{Answer, Ask, Decision, MemberId, MemberState, Membership};
use farside_remote::fabric::ServiceId;
use farside_remote::{Fabric, NodeId};
use std::path::Path;

/// Starts three nodes. Returns them with the urls of the pool.
fn three(folder: &Path) -> (Vec<Process>, Vec<String>) {
    let socket = |number: usize| folder.join(format!("node-{number}.sock"));
    let start = |number: usize| {
        let log = folder.join(format!("log-{number}"));
        let node = serve(&socket(number), &["--memory", "16MiB"], log);
        node.line();
        node
    };
    let urls = (0..3).map(|number| format!("shm:{}", socket(number).display())).collect();
    ((0..3).map(start).collect(), urls)
}

/// Leaves a store `name` as a client does that dies after it has prepared `held` of three members, and has told
/// `committed` of them that the store is committed.
fn leave(pool: &str, name: &str, held: u32, committed: u32) {
    let pool = farside::connect(pool).expect("the nodes serve");
    let ids = pool.nodes().zip(0..).map(|(one, node)| MemberId {
        node,
        incarnation: one.info().expect("the node responds").incarnation,
    });
    let members: Vec<MemberId> = ids.collect();
    let endpoint = pool.endpoint_over_all().expect("sessions");
    let ask = |node: u32, ask: Ask| {
        let (request, mut answer) = (serde_json::to_vec(&ask).expect("plain data"), Vec::new());
        block_on(&endpoint, endpoint.call(NodeId(node), ServiceId::NODE, &request, &mut answer))
            .expect("the node does it");
        serde_json::from_slice::<Answer>(&answer).expect("an answer")
    };
    let attempt = [held.into(), committed.into()];
    for index in 0..held {
        let (state, configuration) = (MemberState::Prepared, 1);
        let membership = Membership { attempt, state, index, configuration, members: members.clone() };
        let (name, kind, parameters) = (name.into(), "prism-kv".into(), r#"{"items":100}"#.into());
        ask(index, Ask::PrepareStore { name, kind, parameters, quota: 3 << 20, membership });
    }
    for node in 0..committed {
        ask(node, Ask::Decide { name: name.into(), attempt, decision: Decision::Commit });
    }
}

#[test]
fn heal_finishes_what_a_dead_client_began() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut nodes, urls) = three(folder.path());
    let pool = urls.join(",");
    let with_pool = |arguments: &[&str]| farside([arguments, &["--pool", &pool]].concat());
    assert_eq!(with_pool(&["heal"]).done().text(), "nothing to heal in 0 stores at 3 nodes\n");
    with_pool(&["heal", "--store", "none"]).refused("there is no store 'none' in the pool");

    leave(&pool, "half", 2, 0);
    leave(&pool, "ready", 3, 1);
    let healed = with_pool(&["heal"]).done();
    assert_eq!(
        healed.text(),
        "store 'half': created at 2 of 3 nodes, attempt aborted\n\
         store 'ready': prepared at 3 of 3 nodes, creation completed\n"
    );
    with_pool(&["kv", "put", "k", "v", "--store", "ready"]).done();
    leave(&pool, "half", 2, 0);
    // Another store than the one to be healed stays as it is.
    let other = with_pool(&["heal", "--store", "ready", "--json"]).done();
    assert!(other.out.is_empty(), "{}", other.text());
    let healed = with_pool(&["heal", "--store", "half", "--json"]).done().json();
    let expected = serde_json::json!({ "store": "half", "action": "aborted", "held": 2, "members": 3 });
    assert_eq!(healed, expected);
    assert_eq!(with_pool(&["heal"]).done().text(), "nothing to heal in 1 store at 3 nodes\n");

    // A node that is gone is a problem, for itself and for the store that it holds.
    nodes[2].kill();
    let ran = with_pool(&["heal", "--json"]);
    assert_eq!(ran.code, Some(2), "{}", ran.err);
    assert!(ran.err.contains("2 problems remain: the reasons are above"), "{}", ran.err);
    let lines: Vec<serde_json::Value> = String::from_utf8_lossy(&ran.out)
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    let [store, node] = &lines[..] else { panic!("two lines: {lines:?}") };
    assert_eq!((&store["store"], &store["action"]), (&"ready".into(), &"left".into()));
    assert!(store["error"].as_str().is_some_and(|error| error.contains("node 2")), "{store}");
    assert_eq!((&node["node"], &node["url"]), (&2.into(), &urls[2].as_str().into()));

    // Two members of the store are at nodes that do not answer, or at none of the pool: one problem, said once.
    let ran = farside(["heal", "--pool", &[&urls[0][..], &urls[2]].join(",")]);
    assert_eq!(ran.code, Some(2), "{}", ran.err);
    assert_eq!(ran.text().matches("store 'ready': not healed").count(), 1, "{}", ran.text());
    assert!(ran.err.contains("2 problems remain"), "{}", ran.err);
}

#[test]
fn nodes_heal_while_they_serve() {
    let folder = tempfile::tempdir().expect("a folder");
    let (_nodes, urls) = three(folder.path());
    let pool = urls.join(",");
    let at = |name: &str| folder.path().join(name);
    farside(["serve", "--memory", "8MiB", "--socket", &at("x.sock").display().to_string(), "--heal"])
        .refused("--heal needs the pool whose stores it heals");
    // Two recoverers at once.
    let arguments = ["--memory", "8MiB", "--heal", "100ms", "--pool", &pool];
    let healers = ["a", "b"].map(|name| {
        let node = serve(&at(&format!("{name}.sock")), &arguments, at(name));
        node.line();
        node
    });
    for (held, committed) in [(1, 0), (3, 1), (2, 0)] {
        leave(&pool, "s", held, committed);
        let is_there = || {
            let members = farside::connect(&pool).and_then(|pool| pool.members("s"));
            members.is_ok_and(|members| members.len() == 3)
        };
        let listed = || farside(["store", "list", "--pool", &pool]).done().text().contains("s\tprism-kv");
        until("the store is healed", || if held == 3 { is_there() } else { !listed() });
        if held == 3 {
            farside(["store", "drop", "s", "--pool", &pool]).done();
        }
    }
    // A recoverer tells what it did after everybody can see it.
    let said = || healers.iter().map(Process::log).collect::<String>();
    until("the first attempt is reported", || {
        said().contains("heal: store 's': created at 1 of 3 nodes, attempt aborted")
    });
    until("the last attempt is reported", || {
        said().contains("heal: store 's': created at 2 of 3 nodes, attempt aborted")
    });
    let said = said();
    assert!(!said.contains("WARN") && !said.contains("ERROR"), "{said}");
}
