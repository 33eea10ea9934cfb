//! A member's part in the replacement of members of its store: it is an acceptor of the register that decides on the
//! next configuration, its key is revoked, and it begins to serve the next configuration. A client coordinates.
//!
//! At each moment the region of a member has one key. While the member is COMMITTED, clients get it. While the member
//! is REVOKED or JOINING, only recoverers get it. Each change of these states draws another key.
//!
//! Invariant: an acceptor never forgets what it promised or accepted for the next configuration, also if another node
//! takes over: the catalog's record says it before the response does.
//! Invariant: the number of a member's configuration never falls.
//! Invariant: once a revocation is answered, no chain of a former key runs.

use super::jobs::Job;
use super::questions::Question;
use super::{Node, NodeMemory, Ticket};
use crate::catalog::Entry;
use crate::restart::Recorded;
use crate::session::{Grace, Sessions};
use crate::{mutants, rebuild, restart};
use farside_remote::arena::Arena;
use farside_remote::arena::session::SessionId;
use farside_remote::control::{
    Accepted, Answer, Attempt, Ballot, MemberId, MemberState, Membership, ROUND_MAX, ROUNDS_AHEAD_MAX,
    Register, Store, check_members,
};
use std::borrow::Cow;
use std::collections::BTreeSet;

/// A change of a member that takes one step.
#[derive(Clone)]
pub(super) enum Change {
    Promise { configuration: u64, ballot: Ballot },
    Accept { configuration: u64, accepted: Accepted },
    Enable { configuration: u64, members: Vec<MemberId>, secret: u64 },
}

/// A revocation in progress.
pub(super) struct Revocation {
    region: u32,
    /// The store's id, which distinguishes it from a later store of the same region.
    id: u64,
    configuration: u64,
    secret: u64,
    /// Tickets that wait for the revocation.
    pub(super) asked: Vec<Ticket>,
    stage: Revoking,
}

/// Progress of a revocation.
enum Revoking {
    /// The revocation is to be recorded.
    Record,
    /// The key is revoked. The sessions that may run chains of it are to be listed, in a step of its own: the step
    /// before has changed the catalog, so it made its last access.
    List,
    /// The key is revoked, but chains that it admitted may still run.
    Chains(Grace),
    /// The store was changed in the meantime: the revocation is refused for this reason.
    Refused(String),
}

impl Revocation {
    /// Whether the revocation waits for nothing yet.
    pub(super) fn is_beginning(&self) -> bool {
        matches!(self.stage, Revoking::Record | Revoking::List)
    }

    /// The sessions for whose turns the revocation waits.
    pub(super) fn waiting_for(&self) -> impl Iterator<Item = SessionId> + '_ {
        let grace = match &self.stage {
            Revoking::Chains(grace) => Some(grace),
            Revoking::Record | Revoking::List | Revoking::Refused(_) => None,
        };
        grace.into_iter().flat_map(Grace::waiting_for)
    }

    /// Waits for the chains that the revoked key admitted. Returns `None` once none of them runs.
    pub(super) fn end_step<M: NodeMemory>(
        &mut self,
        memory: &M,
        sessions: &Sessions,
    ) -> Result<Option<bool>, M::Wait> {
        let is_over = match &mut self.stage {
            Revoking::Record | Revoking::List => false,
            Revoking::Chains(grace) => {
                sessions.is_over(memory, grace)? || mutants::REVOKED_WITHOUT_GRACE.is_on()
            }
            Revoking::Refused(_) => true,
        };
        Ok(if is_over { None } else { Some(false) })
    }
}

impl<M: NodeMemory> Node<M> {
    /// Checks a request for a change of a member, and queues it: the response waits for the catalog's record.
    pub(super) fn begin_change(
        &mut self,
        ticket: Ticket,
        name: String,
        attempt: Attempt,
        change: Change,
    ) -> Result<(), String> {
        self.check_outstanding()?;
        self.member(&name, attempt)?;
        self.questions.push_back((ticket, Question::Change { name, attempt, change }));
        Ok(())
    }

    /// Responds to a request for a revocation at once if nothing is to be revoked, or starts a job.
    pub(super) fn begin_revocation(
        &mut self,
        ticket: Ticket,
        name: &str,
        attempt: Attempt,
        configuration: u64,
        secret: u64,
    ) -> Result<Option<Answer>, String> {
        self.check_outstanding()?;
        let entry = self.member(name, attempt)?;
        let (region, id) = (entry.store.region, entry.store.id);
        let is_begun = |job: &Job<M>| match job {
            Job::Revoke(revocation) => (revocation.id, revocation.configuration) == (id, configuration),
            _ => false,
        };
        if !self.jobs.iter().any(|(_, job)| is_begun(job)) {
            if revoked(entry, configuration, secret)?.is_none() {
                return Ok(Some(Answer::Store(rebuild::shown(entry))));
            }
            let (asked, stage) = (vec![ticket], Revoking::Record);
            let revocation = Revocation { region, id, configuration, secret, asked, stage };
            self.jobs.push_back((ticket, Job::Revoke(revocation)));
            return Ok(None);
        }
        for (_, job) in &mut self.jobs {
            if let Job::Revoke(revocation) = job
                && (revocation.id, revocation.configuration) == (id, configuration)
            {
                revocation.asked.push(ticket);
            }
        }
        Ok(None)
    }

    /// Starts to drop a member whose store exists without it.
    pub(super) fn begin_leave(&mut self, name: &str, membership: &Membership) -> Result<Job<M>, String> {
        if self.catalog.get(name)?.store.membership.as_ref() != Some(membership) {
            return Err(format!(
                "the membership of store '{name}' at this node is another one: nothing was dropped; look at it again"
            ));
        }
        self.begin_drop(name, Answer::Done)
    }

    /// Returns the member of this store, which has been created.
    fn member(&self, name: &str, attempt: Attempt) -> Result<&Entry<M>, String> {
        let entry = self.catalog.get(name)?;
        let is_same = entry.store.membership.as_ref().is_some_and(|of| of.attempt == attempt);
        if !is_same {
            return Err(format!(
                "store '{name}' was replaced by a new store of the same name: open it again"
            ));
        }
        if entry.store.is_prepared() {
            self.check_committed(name)?;
        }
        if entry.rebuild.is_some() {
            return Err(format!("the table of store '{name}' is being rebuilt: wait until it is done"));
        }
        Ok(entry)
    }

    /// Makes a change of a member, and returns the response. The inner error is a refusal.
    pub(super) fn change_step(
        &mut self,
        memory: &M,
        name: &str,
        attempt: Attempt,
        change: Change,
    ) -> Result<Result<Answer, String>, M::Wait> {
        let changed = self.member(name, attempt).and_then(|entry| match change {
            Change::Promise { configuration, ballot } => promised(entry, configuration, ballot),
            Change::Accept { configuration, accepted } => self::accepted(entry, configuration, accepted),
            Change::Enable { configuration, members, secret } => {
                enabled(entry, configuration, members, secret)
            }
        });
        let (state, answer) = match changed {
            Ok((Some(state), answer)) => (state, answer),
            Ok((None, answer)) => return Ok(Ok(answer)),
            Err(refusal) => return Ok(Err(refusal)),
        };
        Ok(self.write_member(memory, state)?.map(|()| answer))
    }

    /// Makes the first step of a revocation: records it, then revokes the key. Or the second one: lists the sessions
    /// for whose turns the revocation waits.
    pub(super) fn revocation_step(&mut self, memory: &M, place: usize) -> Result<(), M::Wait> {
        let Some((_, Job::Revoke(revocation))) = self.jobs.get(place) else { return Ok(()) };
        if matches!(revocation.stage, Revoking::List) {
            let grace = self.sessions.begin_grace(memory)?;
            if let Some((_, Job::Revoke(revocation))) = self.jobs.get_mut(place) {
                revocation.stage = Revoking::Chains(grace);
            }
            return Ok(());
        }
        let (region, id, configuration) = (revocation.region, revocation.id, revocation.configuration);
        let entry = self.catalog.by_region(region).filter(|entry| entry.store.id == id);
        let changed = match entry {
            Some(entry) => revoked(entry, configuration, revocation.secret),
            None => Err(DROPPED.to_owned()),
        };
        let recorded = match changed {
            Ok(Some(state)) => self.write_member(memory, state)?,
            Ok(None) => Ok(()),
            Err(refusal) => Err(refusal),
        };
        let stage = match recorded {
            Ok(()) => Revoking::List,
            Err(refusal) => Revoking::Refused(refusal),
        };
        if let Some((_, Job::Revoke(revocation))) = self.jobs.get_mut(place) {
            revocation.stage = stage;
        }
        Ok(())
    }

    /// The response to a revocation that has ended.
    pub(super) fn end_revocation(&self, revocation: &Revocation) -> Result<Answer, String> {
        if let Revoking::Refused(refusal) = &revocation.stage {
            return Err(refusal.clone());
        }
        let entry = self.catalog.by_region(revocation.region);
        let entry = entry.filter(|entry| entry.store.id == revocation.id).ok_or(DROPPED)?;
        match revoked(entry, revocation.configuration, revocation.secret)? {
            None => Ok(Answer::Store(rebuild::shown(entry))),
            Some(_) => Err(over(&entry.store)),
        }
    }

    /// Writes the record of a changed member, then its key. The inner error is the reason if the record does not fit.
    /// Nothing has changed then.
    fn write_member(&mut self, memory: &M, state: State) -> Result<Result<(), String>, M::Wait> {
        let State { store, register } = state;
        let region = store.region;
        let secret = self.catalog.by_region(region).map(|entry| entry.store.secret);
        let records = || {
            self.catalog.iter().map(|entry| match entry.store.region == region {
                true => {
                    Recorded { store: &store, register: Cow::Borrowed(&register), ..Recorded::from(entry) }
                }
                false => Recorded::from(entry),
            })
        };
        // The stores that are still being created have space in the record.
        let being_made = self.being_made();
        let fits = restart::record(1, &records().chain(being_made).collect::<Vec<_>>());
        let record =
            fits.and_then(|_| restart::record(self.catalog_sequence + 1, &records().collect::<Vec<_>>()));
        let record = match record {
            Ok(record) => record,
            Err(reason) => return Ok(Err(reason)),
        };
        self.write_catalog(memory, &record)?;
        if secret != Some(store.secret) {
            Arena::of(memory).set_secret(region, store.secret)?;
        }
        self.catalog_sequence += 1;
        if let Some(entry) = self.catalog.by_region_mut(region) {
            entry.served.set_secret(store.secret);
            (entry.store, entry.register) = (store, register);
        }
        Ok(Ok(()))
    }
}

/// What the catalog's record says about a member.
struct State {
    store: Store,
    register: Register,
}

/// A member's next state, `None` if it stays as it is; and the response to the request.
type Changed = Result<(Option<State>, Answer), String>;

const DROPPED: &str = "the store was dropped in the meantime";

/// Returns the member's part of the register that decides on this configuration.
fn register<M: NodeMemory>(
    entry: &Entry<M>,
    configuration: u64,
    ballot: Ballot,
) -> Result<(&Membership, Register), String> {
    let own = membership(entry)?;
    if own.state == MemberState::Joining || own.configuration.checked_add(1) != Some(configuration) {
        return Err(over(&entry.store));
    }
    if !(1..=ROUND_MAX).contains(&ballot[0]) {
        return Err(impossible(&format!("the round {} of a ballot is not possible", ballot[0])));
    }
    let promised = entry.register.promised[0];
    if ballot[0] > promised.saturating_add(ROUNDS_AHEAD_MAX) {
        return Err(format!(
            "the round {} of a ballot is too far ahead of {promised}, which is the highest so far: nothing was \
             changed; replace the member by 'farside volume replace' or 'farside heal', which count the rounds",
            ballot[0]
        ));
    }
    Ok((own, entry.register.clone()))
}

fn promised<M: NodeMemory>(entry: &Entry<M>, configuration: u64, ballot: Ballot) -> Changed {
    let (_, mut register) = register(entry, configuration, ballot)?;
    if ballot <= register.promised {
        return Ok((None, Answer::Register(register)));
    }
    register.promised = ballot;
    Ok((Some(State { store: entry.store.clone(), register: register.clone() }), Answer::Register(register)))
}

fn accepted<M: NodeMemory>(entry: &Entry<M>, configuration: u64, accepted: Accepted) -> Changed {
    let (own, mut register) = register(entry, configuration, accepted.ballot)?;
    check_list(own, &accepted.members)?;
    let is_repeated = register.accepted.as_ref().is_some_and(|before| before.ballot == accepted.ballot);
    if accepted.ballot < register.promised || is_repeated {
        return Ok((None, Answer::Register(register)));
    }
    register = Register { promised: accepted.ballot, accepted: Some(accepted) };
    Ok((Some(State { store: entry.store.clone(), register: register.clone() }), Answer::Register(register)))
}

fn enabled<M: NodeMemory>(
    entry: &Entry<M>,
    configuration: u64,
    members: Vec<MemberId>,
    secret: u64,
) -> Changed {
    let own = membership(entry)?;
    let is_same = own.configuration == configuration;
    match own.state {
        MemberState::Committed if is_same && own.members == members => return Ok((None, Answer::Done)),
        MemberState::Joining if is_same && own.members == members => {}
        _ if own.configuration < configuration => {}
        _ => return Err(over(&entry.store)),
    }
    check_list(own, &members)?;
    let incarnation = entry.store.incarnation;
    let index = members.iter().position(|member| member.incarnation == incarnation).unwrap_or(usize::MAX);
    let (attempt, state, index) = (own.attempt, MemberState::Committed, index as u32);
    let membership = Membership { attempt, state, index, configuration, members };
    membership.check(incarnation).map_err(|wrong| impossible(&wrong))?;
    let store = Store { secret: secret.max(1), membership: Some(membership), ..entry.store.clone() };
    Ok((Some(State { store, register: Register::default() }), Answer::Done))
}

/// Returns the state of the member after its key under this configuration was revoked; `None` if recoverers have the
/// member's key already.
fn revoked<M: NodeMemory>(
    entry: &Entry<M>,
    configuration: u64,
    secret: u64,
) -> Result<Option<State>, String> {
    let own = membership(entry)?;
    match own.state {
        MemberState::Joining if configuration.checked_add(1) == Some(own.configuration) => Ok(None),
        MemberState::Revoked if own.configuration == configuration => Ok(None),
        MemberState::Committed if own.configuration == configuration => {
            let membership = Some(Membership { state: MemberState::Revoked, ..own.clone() });
            let store = Store { secret: secret.max(1), membership, ..entry.store.clone() };
            Ok(Some(State { store, register: entry.register.clone() }))
        }
        _ => Err(over(&entry.store)),
    }
}

/// # Errors
/// The list cannot be one of a configuration of this store.
fn check_list(own: &Membership, members: &[MemberId]) -> Result<(), String> {
    check_members(members).map_err(|wrong| impossible(&wrong))?;
    match members.len() == own.members.len() {
        true => Ok(()),
        false => Err(impossible(&format!("a configuration of this store has {} members", own.members.len()))),
    }
}

/// The refusal of a request that no recoverer of this release sends.
fn impossible(wrong: &str) -> String {
    format!("{wrong}: nothing was changed; use the same release on both sides")
}

fn membership<M: NodeMemory>(entry: &Entry<M>) -> Result<&Membership, String> {
    entry.store.membership.as_ref().ok_or_else(|| over(&entry.store))
}

/// The refusal of a request about a configuration that is over, or that is not the next one.
fn over(store: &Store) -> String {
    let configuration = store.membership.as_ref().map_or(0, |membership| membership.configuration);
    format!(
        "store '{}' is in configuration {configuration} at this node, so the request about another one was not carried \
         out: look at the store's members again",
        store.name
    )
}

/// The refusal of a revocation that waits for stopped processes.
pub(super) fn delayed(pids: &BTreeSet<u32>) -> String {
    let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
    format!(
        "the store's key is revoked, but process {} is stopped during an operation, which it may still complete: \
         continue or kill it, or serve with --evict-stopped-after to have it killed; then repeat the revocation",
        pids.join(", ")
    )
}
