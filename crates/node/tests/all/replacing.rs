//! A member whose store is about to have other members: the acceptor of the register that decides, the revocation of
//! the key, and the next configuration.

use crate::support::Home;
use farside_remote::control::{
    Accepted, Answer, Ask, Attempt, Ballot, CONFIGURATION_MAX, Decision, Found, MemberId, MemberState,
    Membership, ROUND_MAX, ROUNDS_AHEAD_MAX, Register, Store,
};
use farside_remote::{Key, Memory, Rights};
use std::sync::atomic::{AtomicU64, Ordering};

const ATTEMPT: Attempt = [7, 8];
const NAME: &str = "m";

fn name() -> String {
    NAME.to_owned()
}

/// A list of members in which the tests' node, whose incarnation is 0, is the first.
fn list(others: [u64; 2]) -> Vec<MemberId> {
    let ids = [0, others[0], others[1]];
    ids.into_iter().zip(0..).map(|(incarnation, node)| MemberId { node, incarnation }).collect()
}

fn prepare(state: MemberState, configuration: u64, members: Vec<MemberId>) -> Ask {
    let membership = Membership { attempt: ATTEMPT, state, index: 0, configuration, members };
    let (kind, parameters) = ("slots".to_owned(), "32".to_owned());
    Ask::PrepareStore { name: name(), kind, parameters, quota: 2 << 20, membership }
}

/// A node with a committed member of configuration 1.
fn home() -> Home {
    let mut home = Home::new();
    home.ask(prepare(MemberState::Prepared, 1, list([1, 2])));
    home.ask(Ask::Decide { name: name(), attempt: ATTEMPT, decision: Decision::Commit });
    home
}

/// Different numbers for each request.
fn entropy() -> [u64; 2] {
    static NEXT: AtomicU64 = AtomicU64::new(100);
    [(); 2].map(|()| NEXT.fetch_add(1, Ordering::Relaxed))
}

fn ask(home: &mut Home, ask: Ask) -> Result<Answer, String> {
    home.node.ask(ask, entropy());
    home.idle();
    home.node.answer().expect("a response").1
}

fn store(answer: Result<Answer, String>) -> Store {
    match answer {
        Ok(Answer::Store(store)) => store,
        other => panic!("asked for a store, got {other:?}"),
    }
}

fn register(answer: Result<Answer, String>) -> Register {
    match answer {
        Ok(Answer::Register(register)) => register,
        other => panic!("asked an acceptor, got {other:?}"),
    }
}

fn found(home: &mut Home) -> (Option<Membership>, Option<Accepted>) {
    match ask(home, Ask::FindStore { name: name() }) {
        Ok(Answer::Found(Found { store, accepted, .. })) => {
            assert!(store.as_ref().is_none_or(|store| (store.secret, store.id) == (0, 0)));
            (store.and_then(|store| store.membership), accepted)
        }
        other => panic!("asked for a store, got {other:?}"),
    }
}

fn promise(home: &mut Home, configuration: u64, ballot: Ballot) -> Result<Answer, String> {
    ask(home, Ask::Promise { name: name(), attempt: ATTEMPT, configuration, ballot })
}

fn accept(
    home: &mut Home,
    configuration: u64,
    ballot: Ballot,
    members: Vec<MemberId>,
) -> Result<Answer, String> {
    ask(home, Ask::Accept { name: name(), attempt: ATTEMPT, configuration, ballot, members })
}

fn revoke(home: &mut Home, configuration: u64) -> Result<Answer, String> {
    ask(home, Ask::Revoke { name: name(), attempt: ATTEMPT, configuration })
}

fn enable(home: &mut Home, configuration: u64, members: Vec<MemberId>) -> Result<Answer, String> {
    ask(home, Ask::Enable { name: name(), attempt: ATTEMPT, configuration, members })
}

fn open(home: &mut Home) -> Result<Answer, String> {
    ask(home, Ask::OpenStore { name: name() })
}

fn opens(home: &Home, key: Key) -> bool {
    home.memory.admits(key).is_ok_and(|rights| rights != Rights::NONE)
}

/// Another node takes over the memory.
fn restart(home: &mut Home) {
    home.succeed();
    home.idle();
}

#[test]
fn a_service_is_called_by_the_key_that_the_last_change_has_drawn() {
    let mut home = home();
    let mut keys = vec![store(open(&mut home)).extent().key];
    keys.push(store(revoke(&mut home, 1)).extent().key);
    enable(&mut home, 2, list([1, 3])).expect("the next configuration");
    keys.push(store(open(&mut home)).extent().key);
    assert!(keys[0] != keys[1] && keys[1] != keys[2], "{keys:?}");
    let served = home.node.served(keys[2].region()).expect("the store is served");
    assert_eq!(served.key(), keys[2]);
}

/// Else no recoverer could outbid the promise, and the member would never be replaced.
#[test]
fn a_promise_of_a_round_far_ahead_is_refused_and_the_next_round_is_not() {
    let mut home = home();
    let refusal = promise(&mut home, 2, [ROUND_MAX, 1]).expect_err("a round that no recoverer reaches");
    assert!(
        refusal.contains("is too far ahead of 0") && refusal.contains("nothing was changed"),
        "{refusal}"
    );
    assert_eq!(register(promise(&mut home, 2, [1, 1])).promised, [1, 1]);
    // A member that has missed many ballots promises the next one nevertheless.
    assert_eq!(
        register(promise(&mut home, 2, [1 + ROUNDS_AHEAD_MAX, 5])).promised,
        [1 + ROUNDS_AHEAD_MAX, 5]
    );
    assert!(promise(&mut home, 2, [2 + 2 * ROUNDS_AHEAD_MAX, 5]).is_err());
    assert_eq!(
        register(promise(&mut home, 2, [2 + ROUNDS_AHEAD_MAX, 6])).promised,
        [2 + ROUNDS_AHEAD_MAX, 6]
    );
}

#[test]
fn an_acceptor_never_goes_back_also_after_a_restart() {
    let mut home = home();
    let (mine, other) = (list([1, 3]), list([2, 3]));
    assert_eq!(register(promise(&mut home, 2, [1, 5])), Register { promised: [1, 5], accepted: None });
    restart(&mut home);
    assert_eq!(register(promise(&mut home, 2, [1, 4])).promised, [1, 5], "a lower ballot");
    assert_eq!(register(promise(&mut home, 2, [1, 5])).promised, [1, 5], "a repeated promise");
    assert_eq!(register(accept(&mut home, 2, [1, 4], other.clone())).accepted, None);
    let accepted = Accepted { ballot: [1, 5], members: mine.clone() };
    let holds = Register { promised: [1, 5], accepted: Some(accepted.clone()) };
    assert_eq!(register(accept(&mut home, 2, [1, 5], mine.clone())), holds);
    assert_eq!(register(accept(&mut home, 2, [1, 5], other.clone())), holds, "a ballot has one list");
    restart(&mut home);
    assert_eq!(found(&mut home).1, Some(accepted.clone()));
    let promised = Register { promised: [2, 1], accepted: Some(accepted) };
    assert_eq!(register(promise(&mut home, 2, [2, 1])), promised, "the accepted list is not forgotten");
    restart(&mut home);
    assert_eq!(register(accept(&mut home, 2, [1, 9], other)), promised);
    for configuration in [0, 1, 3, u64::MAX] {
        let refusal = promise(&mut home, configuration, [9, 9]).expect_err("another configuration");
        assert!(refusal.contains("is in configuration 1") && refusal.contains("look at"), "{refusal}");
    }
    for ballot in [[0, 1], [ROUND_MAX + 1, 0]] {
        assert!(promise(&mut home, 2, ballot).expect_err("no such round").contains("round"));
    }
    let mut twice = mine.clone();
    twice[1] = twice[2];
    for bad in [mine[..2].to_vec(), twice, Vec::new()] {
        assert!(accept(&mut home, 2, [3, 0], bad).is_err());
    }
    let stranger = Ask::Promise { name: name(), attempt: [7, 9], configuration: 2, ballot: [9, 9] };
    assert!(ask(&mut home, stranger).expect_err("another store").contains("open it again"));
}

#[test]
fn a_revoked_key_opens_nothing_and_recoverers_have_another() {
    let mut home = home();
    let old = store(open(&mut home)).extent().key;
    assert!(revoke(&mut home, 2).expect_err("another configuration").contains("is in configuration 1"));
    assert!(opens(&home, old));
    let recoverers = store(revoke(&mut home, 1)).extent().key;
    assert!(!opens(&home, old) && opens(&home, recoverers));
    for restarts in [false, true] {
        if restarts {
            restart(&mut home);
        }
        let refusal = open(&mut home).expect_err("clients get no key");
        assert!(refusal.contains("is being replaced") && refusal.contains("farside heal"), "{refusal}");
        assert_eq!(found(&mut home).0.map(|of| of.state), Some(MemberState::Revoked));
        assert_eq!(store(revoke(&mut home, 1)).extent().key, recoverers, "a second recoverer");
        assert!(opens(&home, recoverers));
    }
    assert_eq!(register(promise(&mut home, 2, [1, 5])).promised, [1, 5], "it is an acceptor still");
}

/// The key of a revoked configuration admits no new chain, and the response waits for the chains that it admitted.
pub(crate) fn a_revocation_waits_for_turns_and_names_a_stopped_process() {
    let mut home = home();
    let old = store(open(&mut home)).extent().key;
    let (stopped, other) = (home.client(), home.client());
    stopped.begin_turn();
    other.begin_turn();
    let request = || Ask::Revoke { name: name(), attempt: ATTEMPT, configuration: 1 };
    for _ in 0..2 {
        home.node.ask(request(), [1, 2]);
        home.idle();
        assert_eq!(home.node.answer(), None, "both may be running chains");
    }
    assert!(!opens(&home, old));
    other.end_turn();
    other.begin_turn();
    home.idle();
    assert_eq!((home.node.answer(), home.node.delayed_by()), (None, vec![stopped.pid]));
    home.node.report_stopped(&[stopped.pid]);
    for _ in 0..2 {
        let (_, delayed) = home.node.answer().expect("the response names the process");
        let delayed = delayed.expect_err("the process may yet complete its chain");
        assert!(delayed.contains(&format!("process {} is stopped", stopped.pid)), "{delayed}");
    }
    home.node.ask(request(), [1, 2]);
    home.idle();
    assert_eq!(home.node.answer(), None, "a repeated revocation waits again");
    stopped.end_turn();
    home.idle();
    assert!(matches!(home.node.answer(), Some((_, Ok(Answer::Store(_))))));
    assert_eq!(home.node.answer(), None);
    // The store is dropped while a revocation waits.
    other.end_turn();
    home.node
        .ask(Ask::Enable { name: name(), attempt: ATTEMPT, configuration: 2, members: list([1, 3]) }, [1, 2]);
    home.idle();
    assert!(matches!(home.node.answer(), Some((_, Ok(Answer::Done)))));
    stopped.begin_turn();
    home.node.ask(Ask::Revoke { name: name(), attempt: ATTEMPT, configuration: 2 }, [1, 2]);
    home.idle();
    home.node.ask(Ask::Decide { name: name(), attempt: ATTEMPT, decision: Decision::Drop }, [1, 2]);
    home.idle();
    assert_eq!(home.node.answer(), None);
    stopped.end_turn();
    home.idle();
    let answers: Vec<_> = std::iter::from_fn(|| home.node.answer()).map(|(_, answer)| answer).collect();
    assert!(matches!(&answers[..], [Err(dropped), Ok(Answer::Decided(_))] if dropped.contains("dropped")));
    assert!(revoke(&mut home, 1).is_err());
}

#[test]
fn a_revocation_waits_and_names_whom() {
    a_revocation_waits_for_turns_and_names_a_stopped_process();
}

#[test]
fn an_enabled_configuration_has_a_new_key_and_the_former_is_over() {
    for is_revoked in [false, true] {
        let mut home = home();
        let old = store(open(&mut home)).extent().key;
        assert_eq!(register(promise(&mut home, 2, [1, 5])).promised, [1, 5]);
        let recoverers = is_revoked.then(|| store(revoke(&mut home, 1)).extent().key);
        let next = list([1, 3]);
        assert!(enable(&mut home, 2, vec![next[1], next[2]]).is_err(), "it is no member");
        for _ in 0..2 {
            assert_eq!(enable(&mut home, 2, next.clone()), Ok(Answer::Done));
        }
        let new = store(open(&mut home));
        assert!(opens(&home, new.extent().key) && !opens(&home, old));
        assert!(recoverers.is_none_or(|key| !opens(&home, key)));
        restart(&mut home);
        assert!(opens(&home, new.extent().key));
        let membership = new.membership.expect("it has members");
        assert_eq!((membership.configuration, &membership.members), (2, &next));
        assert_eq!((membership.index, membership.state), (0, MemberState::Committed));
        for refused in [
            enable(&mut home, 2, list([2, 3])),
            enable(&mut home, 1, list([1, 2])),
            revoke(&mut home, 1),
            promise(&mut home, 2, [9, 9]),
        ] {
            assert!(refused.expect_err("that is over").contains("is in configuration 2"));
        }
        assert_eq!(register(promise(&mut home, 3, [1, 1])), Register { promised: [1, 1], accepted: None });
        // A member that has missed a configuration.
        assert_eq!(enable(&mut home, 4, list([8, 9])), Ok(Answer::Done));
        assert_eq!(found(&mut home).0.map(|of| of.configuration), Some(4));
    }
}

#[test]
fn a_newcomer_gives_clients_no_key_before_it_is_enabled() {
    let mut home = Home::new();
    let free = home.node.info().unassigned_bytes;
    assert!(ask(&mut home, prepare(MemberState::Joining, 1, list([1, 2]))).is_err());
    assert!(ask(&mut home, prepare(MemberState::Prepared, 2, list([1, 2]))).is_err());
    let joining = store(ask(&mut home, prepare(MemberState::Joining, 2, list([1, 2]))));
    assert_eq!(joining.secret, 0);
    assert!(open(&mut home).expect_err("it is not enabled").contains("is being replaced"));
    assert!(promise(&mut home, 2, [1, 1]).is_err(), "it does not decide on its own configuration");
    assert!(promise(&mut home, 3, [1, 1]).is_err());
    let key = store(revoke(&mut home, 1)).extent().key;
    restart(&mut home);
    assert_eq!(store(revoke(&mut home, 1)).extent().key, key);
    assert!(opens(&home, key));
    assert!(enable(&mut home, 2, list([1, 3])).is_err(), "it joins another list");
    let membership = joining.membership.expect("it has members");
    let wrong = Membership { configuration: 3, ..membership.clone() };
    let leave = |membership: &Membership| Ask::Leave { name: name(), membership: membership.clone() };
    assert!(ask(&mut home, leave(&wrong)).expect_err("another membership").contains("look at it again"));
    assert_eq!(enable(&mut home, 2, list([1, 2])), Ok(Answer::Done));
    assert!(!opens(&home, key) && open(&mut home).is_ok());
    assert!(ask(&mut home, leave(&membership)).is_err(), "it has begun to serve");
    let membership = Membership { state: MemberState::Committed, ..membership };
    assert_eq!(ask(&mut home, leave(&membership)), Ok(Answer::Done));
    assert_eq!((found(&mut home).0, home.node.info().unassigned_bytes), (None, free));
}

/// Requests with fields that no recoverer of this release sends, from a client with admin rights.
#[test]
fn hostile_requests_are_refused_and_change_nothing() {
    let mut home = home();
    let key = store(open(&mut home)).extent().key;
    let before = found(&mut home);
    let many = |count: u64| -> Vec<MemberId> {
        (0..count).map(|incarnation| MemberId { node: u32::MAX, incarnation }).collect()
    };
    let lists = [
        Vec::new(),
        list([1, 2])[..1].to_vec(),
        list([1, 2])[..2].to_vec(),
        list([1, 1]),
        many(4),
        many(5),
        many(64),
        many(65),
        many(700),
    ];
    let membership = |state, configuration, index, members: &[MemberId]| Membership {
        attempt: ATTEMPT,
        state,
        index,
        configuration,
        members: members.to_vec(),
    };
    let mut hostile = Vec::new();
    for configuration in [0, 1, 3, ROUND_MAX, u64::MAX - 1, u64::MAX] {
        let (name, attempt, members) = (name(), ATTEMPT, list([1, 3]));
        hostile.push(Ask::Promise { name: name.clone(), attempt, configuration, ballot: [1, 1] });
        let (ballot, of) = ([1, 1], members.clone());
        hostile.push(Ask::Accept { name: name.clone(), attempt, configuration, ballot, members: of });
        if configuration != 1 {
            hostile.push(Ask::Revoke { name: name.clone(), attempt, configuration });
        }
        if !(3..=CONFIGURATION_MAX).contains(&configuration) {
            hostile.push(Ask::Enable { name: name.clone(), attempt, configuration, members });
        }
    }
    for ballot in
        [[0, 0], [0, u64::MAX], [ROUNDS_AHEAD_MAX + 1, 0], [ROUND_MAX, 9], [ROUND_MAX + 1, 0], [u64::MAX; 2]]
    {
        let (attempt, configuration, members) = (ATTEMPT, 2, list([1, 3]));
        hostile.push(Ask::Promise { name: name(), attempt, configuration, ballot });
        hostile.push(Ask::Accept { name: name(), attempt, configuration, ballot, members });
    }
    for members in &lists {
        let (attempt, configuration, ballot) = (ATTEMPT, 2, [1, 1]);
        let list = || members.clone();
        hostile.push(Ask::Accept { name: name(), attempt, configuration, ballot, members: list() });
        hostile.push(Ask::Enable { name: name(), attempt, configuration, members: list() });
        let membership = membership(MemberState::Committed, 1, 0, members);
        hostile.push(Ask::Leave { name: name(), membership });
    }
    for (name, attempt) in [("other", ATTEMPT), ("", ATTEMPT), (NAME, [8, 7]), (NAME, [u64::MAX; 2])] {
        let (name, configuration, members) = (|| name.to_owned(), 2, list([1, 3]));
        hostile.push(Ask::Promise { name: name(), attempt, configuration, ballot: [1, 1] });
        let of = members.clone();
        hostile.push(Ask::Accept { name: name(), attempt, configuration, ballot: [1, 1], members: of });
        hostile.push(Ask::Revoke { name: name(), attempt, configuration: 1 });
        hostile.push(Ask::Enable { name: name(), attempt, configuration, members: members.clone() });
        let membership = Membership { attempt, ..membership(MemberState::Committed, 1, 0, &members) };
        hostile.push(Ask::Leave { name: name(), membership });
    }
    let free = home.node.info().unassigned_bytes;
    for (configuration, index, quota) in [
        (0, 0, 2 << 20),
        (1, 0, 2 << 20),
        (u64::MAX, 0, 2 << 20),
        (2, u32::MAX, 2 << 20),
        (2, 0, u64::MAX),
        (2, 0, 0),
    ] {
        let membership = membership(MemberState::Joining, configuration, index, &list([1, 3]));
        let (kind, parameters) = ("slots".to_owned(), "32".to_owned());
        hostile.push(Ask::PrepareStore { name: "new".into(), kind, parameters, quota, membership });
    }
    for request in hostile {
        let refusal = ask(&mut home, request.clone()).expect_err("no recoverer sends this");
        assert!(refusal.contains(": ") && refusal.len() < 400, "{request:?}: {refusal}");
        assert_eq!(found(&mut home), before, "{request:?}");
    }
    assert!(opens(&home, key) && home.node.info().unassigned_bytes == free);
    // The highest ballot and the highest configuration are possible, and nothing overflows behind them.
    let highest = [ROUNDS_AHEAD_MAX, u64::MAX];
    assert_eq!(register(promise(&mut home, 2, highest)).promised, highest);
    assert_eq!(enable(&mut home, CONFIGURATION_MAX, list([1, 3])), Ok(Answer::Done));
    restart(&mut home);
    assert!(enable(&mut home, CONFIGURATION_MAX + 1, list([1, 3])).is_err());
    let promised = register(promise(&mut home, CONFIGURATION_MAX + 1, [1, 1]));
    assert_eq!(promised.promised, [1, 1]);
}
