//! Requests about members of stores that lie on several nodes: they wait until the catalog's record shows what the node
//! knows, and change at most what it says about one member.

use super::replacing::Change;
use super::{Node, NodeMemory, Ticket};
use crate::rebuild;
use crate::{mutants, restart};
use farside_remote::arena::Arena;
use farside_remote::control::{Answer, Attempt, Decided, Decision, Found, MemberState, Store};

/// A request about a member of a store that changes at most what the catalog's record says about the member.
pub(super) enum Question {
    Find { name: String },
    Commit { name: String, attempt: Attempt },
    Absent { name: String },
    Change { name: String, attempt: Attempt, change: Change },
}

impl Question {
    pub(super) fn name(&self) -> &str {
        match self {
            Question::Find { name }
            | Question::Commit { name, .. }
            | Question::Absent { name }
            | Question::Change { name, .. } => name,
        }
    }
}

impl<M: NodeMemory> Node<M> {
    /// Handles a decision on an attempt to create a store with several members. The first decision holds: only a drop
    /// changes a committed store, and nothing changes an aborted one.
    ///
    /// A slow creator may ask a first member that was replaced and dropped long ago, and take its answer for an abort.
    /// So a member of a later configuration refuses to abort: the attempt was committed before its first replacement.
    pub(super) fn begin_decision(
        &mut self,
        ticket: Ticket,
        name: String,
        attempt: Attempt,
        decision: Decision,
    ) -> Result<Option<Answer>, String> {
        let member = self.catalog.get(&name).ok().and_then(|entry| entry.store.membership.as_ref());
        let member = member.filter(|member| member.attempt == attempt);
        let is_kept = member.is_some_and(|member| member.index == 0 || member.configuration > 1);
        let state = match member.map_or(MemberState::Aborted, |member| member.state) {
            // The attempt was committed before a member was replaced.
            MemberState::Revoked | MemberState::Joining => MemberState::Committed,
            state => state,
        };
        match (decision, state) {
            (_, MemberState::Aborted) => {
                self.check_outstanding()?;
                self.questions.push_back((ticket, Question::Absent { name }));
            }
            (Decision::Commit, MemberState::Prepared) => {
                self.check_outstanding()?;
                self.questions.push_back((ticket, Question::Commit { name, attempt }));
            }
            (Decision::Commit, _) => return Ok(Some(self.decided(state))),
            (Decision::Abort, MemberState::Committed) if is_kept && !mutants::BOTH_DECISIONS.is_on() => {
                return Ok(Some(self.decided(state)));
            }
            (Decision::Abort | Decision::Drop, _) => {
                let job = self.begin_drop(&name, self.decided(MemberState::Aborted))?;
                self.jobs.push_back((ticket, job));
            }
        }
        Ok(None)
    }

    fn decided(&self, state: MemberState) -> Answer {
        Answer::Decided(Decided { incarnation: self.info.incarnation, state })
    }

    /// # Errors
    /// The store is PREPARED, so nobody may use it yet; or its key is only for recoverers.
    pub(super) fn check_committed(&self, name: &str) -> Result<(), String> {
        self.check_not_refused(name)?;
        let store = &self.catalog.get(name)?.store;
        if store.is_prepared() {
            return Err(format!(
                "store '{name}' is being created on several nodes: retry with all of its nodes in --pool, or drop it"
            ));
        }
        if !store.is_served() {
            return Err(format!(
                "a member of store '{name}' is being replaced, and this node does not serve the store meanwhile: retry \
                 in a moment; if the replacement was interrupted, complete it with 'farside heal'"
            ));
        }
        Ok(())
    }

    /// Answers the first question about a member, whose store is recorded ([`Node::is_recorded`]). The response says
    /// only what the catalog's record says: a node that takes over must not know another answer.
    pub(super) fn question_step(&mut self, memory: &M) -> Result<bool, M::Wait> {
        let Some((_, question)) = self.questions.front() else { return Ok(false) };
        let entry = self.catalog.get(question.name()).ok();
        let answer = match question {
            Question::Find { .. } => {
                let store =
                    entry.map(|entry| Store { secret: 0, id: 0, created: 0, ..rebuild::shown(entry) });
                let accepted = entry.and_then(|entry| entry.register.accepted.clone());
                Ok(Answer::Found(Found { incarnation: self.info.incarnation, store, accepted }))
            }
            Question::Absent { .. } => Ok(self.decided(MemberState::Aborted)),
            Question::Change { name, attempt, change } => {
                let (name, attempt, change) = (name.clone(), *attempt, change.clone());
                self.change_step(memory, &name, attempt, change)?
            }
            Question::Commit { attempt, .. } => {
                let member = entry.and_then(|entry| entry.store.membership.as_ref());
                match member.filter(|member| member.attempt == *attempt).map(|member| member.state) {
                    Some(MemberState::Prepared) => {
                        let region = entry.map_or(0, |entry| entry.store.region);
                        self.commit(memory, region)?.map(|()| self.decided(MemberState::Committed))
                    }
                    state => Ok(self.decided(state.unwrap_or(MemberState::Aborted))),
                }
            }
        };
        let Some((ticket, _)) = self.questions.pop_front() else { return Ok(false) };
        self.answers.push_back((ticket, answer));
        Ok(true)
    }

    /// Commits a prepared store: writes the record, then the key. The inner error is the reason if the record does not
    /// fit.
    fn commit(&mut self, memory: &M, region: u32) -> Result<Result<(), String>, M::Wait> {
        let Some(entry) = self.catalog.by_region(region) else { return Ok(Ok(())) };
        let mut store = entry.store.clone();
        if let Some(membership) = &mut store.membership {
            membership.state = MemberState::Committed;
        }
        let record = match restart::record(self.catalog_sequence + 1, &self.stores_with(&store)) {
            Ok(record) => record,
            Err(reason) => return Ok(Err(reason)),
        };
        self.write_catalog(memory, &record)?;
        Arena::of(memory).set_secret(region, store.secret)?;
        self.catalog_sequence += 1;
        if let Some(entry) = self.catalog.by_region_mut(region) {
            entry.store = store;
        }
        Ok(Ok(()))
    }
}
