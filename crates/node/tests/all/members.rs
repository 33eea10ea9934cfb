//! Members of stores that lie on several nodes: the decision, the key, and a node that takes over.

use crate::support::Home;
use farside_remote::Memory;
use farside_remote::control::{
    Answer, Ask, Attempt, Decided, Decision, Found, MemberId, MemberState, Membership,
};

const ATTEMPT: Attempt = [7, 8];

fn prepare(name: &str, index: u32) -> Ask {
    // The incarnation of the tests' node is 0.
    let mut members = vec![MemberId { node: 0, incarnation: 5 }, MemberId { node: 1, incarnation: 6 }];
    members[index as usize].incarnation = 0;
    let state = MemberState::Prepared;
    let membership = Membership { attempt: ATTEMPT, state, index, configuration: 1, members };
    let (name, kind, parameters) = (name.to_owned(), "slots".to_owned(), "32".to_owned());
    Ask::PrepareStore { name, kind, parameters, quota: 2 << 20, membership }
}

fn decided(home: &mut Home, attempt: Attempt, decision: Decision) -> MemberState {
    match home.ask(Ask::Decide { name: "m".into(), attempt, decision }) {
        Some(Answer::Decided(Decided { incarnation: 0, state })) => state,
        other => panic!("asked for a decision, got {other:?}"),
    }
}

fn found(home: &mut Home) -> Option<MemberState> {
    match home.ask(Ask::FindStore { name: "m".into() }) {
        Some(Answer::Found(Found { store, .. })) => {
            let store = store?;
            assert_eq!((store.secret, store.id), (0, 0), "the key is only for clients that open the store");
            store.membership.map(|membership| membership.state)
        }
        other => panic!("asked for a store, got {other:?}"),
    }
}

fn refused(home: &mut Home, ask: Ask) -> String {
    home.node.ask(ask, [1, 2]);
    home.idle();
    home.node.answer().expect("a response").1.expect_err("it is refused")
}

#[test]
fn a_prepared_store_opens_nothing_until_it_is_committed() {
    let mut home = Home::new();
    let Some(Answer::Store(store)) = home.ask(prepare("m", 0)) else { panic!("a store") };
    assert_eq!((store.secret, found(&mut home)), (0, Some(MemberState::Prepared)));
    for ask in [
        Ask::OpenStore { name: "m".into() },
        Ask::RebuildStore { name: "m".into(), parameters: "{}".into() },
        Ask::GrowStore { name: "m".into() },
    ] {
        assert!(refused(&mut home, ask).contains("is being created on several nodes"));
    }
    assert!(refused(&mut home, Ask::DropStore { name: "m".into() }).contains("has 2 members"));
    assert_eq!(decided(&mut home, [7, 9], Decision::Commit), MemberState::Aborted, "another attempt");
    assert_eq!(decided(&mut home, ATTEMPT, Decision::Commit), MemberState::Committed);
    let Some(Answer::Store(store)) = home.ask(Ask::OpenStore { name: "m".into() }) else { panic!("a store") };
    assert!(
        home.memory.admits(store.extent().key).is_ok_and(|rights| rights != farside_remote::Rights::NONE)
    );
}

#[test]
pub(crate) fn the_first_decision_holds_and_only_a_drop_ends_a_committed_store() {
    let mut home = Home::new();
    let free = home.node.info().unassigned_bytes;
    home.ask(prepare("m", 0));
    assert_eq!(decided(&mut home, ATTEMPT, Decision::Commit), MemberState::Committed);
    assert_eq!(decided(&mut home, ATTEMPT, Decision::Abort), MemberState::Committed);
    assert_eq!(decided(&mut home, ATTEMPT, Decision::Drop), MemberState::Aborted);
    assert_eq!(decided(&mut home, ATTEMPT, Decision::Commit), MemberState::Aborted);
    assert_eq!((found(&mut home), home.node.info().unassigned_bytes), (None, free));

    home.ask(prepare("m", 0));
    assert_eq!(decided(&mut home, ATTEMPT, Decision::Abort), MemberState::Aborted);
    assert_eq!(decided(&mut home, ATTEMPT, Decision::Commit), MemberState::Aborted);
    assert_eq!(home.node.info().unassigned_bytes, free);
}

#[test]
fn a_node_that_takes_over_knows_the_same_decision() {
    for decision in [None, Some(Decision::Commit), Some(Decision::Abort)] {
        let mut home = Home::new();
        home.ask(prepare("m", 1));
        let state = decision.map(|decision| decided(&mut home, ATTEMPT, decision));
        home.succeed();
        home.idle();
        let known = found(&mut home).unwrap_or(MemberState::Aborted);
        assert_eq!(known, state.unwrap_or(MemberState::Prepared));
    }
}

#[test]
fn an_answer_waits_until_a_drop_is_recorded() {
    let mut home = Home::new();
    home.ask(prepare("m", 0));
    home.node.ask(Ask::Decide { name: "m".into(), attempt: ATTEMPT, decision: Decision::Abort }, [1, 2]);
    home.node.ask(Ask::FindStore { name: "m".into() }, [1, 2]);
    // If the node dies before it has answered the second request, the next one may know the store. Not afterwards.
    while home.node.answer().is_none() {
        home.step();
    }
    home.succeed();
    assert_eq!(found(&mut home), None);
}

#[test]
fn a_malformed_membership_is_refused_with_a_remedy() {
    type Damage = fn(&mut Membership);
    let damages: [Damage; 6] = [
        |membership| membership.index = 2,
        |membership| membership.members.truncate(1),
        |membership| membership.members[0].incarnation = 9,
        |membership| membership.members[1].incarnation = 0,
        |membership| membership.state = MemberState::Committed,
        |membership| membership.configuration = 0,
    ];
    let mut home = Home::new();
    for damage in damages {
        let mut ask = prepare("m", 0);
        let Ask::PrepareStore { membership, .. } = &mut ask else { continue };
        damage(membership);
        let refusal = refused(&mut home, ask);
        assert!(refusal.contains("was not prepared") && refusal.contains("create it again"), "{refusal}");
    }
    assert_eq!(found(&mut home), None);
}
