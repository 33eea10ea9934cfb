//! The parts of an engine's turn that need no thread, no socket and no clock of the system. The engines of
//! [`crate::host`] and those of the simulator share them.
//!
//! Invariant: a session learns of a response only what [`Serves::respond`] lets it know.

use farside_fabrics::session::answer;
use farside_fabrics::session::carrier::{Arrival, Outsider};
use farside_fabrics::session::server::{Address, End, Host, RequestRef, Server};
use farside_remote::ChainView;
use farside_remote::control::{Answer, Ask, Store};
use std::net::IpAddr;
use std::time::Duration;

/// The host of an engine's sessions, with what an engine's turn needs of it.
pub trait Serves: Host {
    /// Number of a session, by which the node knows it.
    fn number(session: &Self::Session) -> u32;

    /// Encodes the node's response for the session that has asked.
    ///
    /// # Errors
    /// The reason of a refusal: the node's, or that the session may not have the response.
    fn respond(
        &mut self,
        session: &mut Self::Session,
        answered: Result<Answer, String>,
    ) -> Result<Vec<u8>, String>;

    /// Notes from which machine the next datagram comes; `None` if all clients are on this machine.
    fn note_source(&mut self, source: Option<IpAddr>) {
        let _ = source;
    }

    /// Returns the reason that a client gets whose greeting the carrier rejects.
    fn turn_away(&mut self, why: Outsider) -> String;
}

/// Handles an arrival at an engine's port: runs requests, or ends the sessions of a client whose carrier has closed.
/// Reads the time only if it is needed.
#[inline]
pub fn arrive<A: Address, H: Serves>(
    (server, host): (&mut Server<A, H>, &mut H),
    (from, source): (A, Option<IpAddr>),
    arrival: Arrival<'_>,
    now: impl FnOnce() -> Duration,
) {
    match arrival {
        Arrival::Datagram(bytes) => {
            let now = now();
            host.note_source(source);
            let _refused_is_counted = server.receive(now, from, bytes, host);
        }
        Arrival::HungUp => server.hang_up(from, host),
        Arrival::Outsider(nonce, why) => {
            host.note_source(source);
            let reason = host.turn_away(why);
            server.refuse(from, nonce, &reason);
        }
    }
}

/// Delivers what the node's thread has for an engine: ends the sessions with the numbers `fenced`, whose clients were
/// fenced, and passes the responses on to the sessions that still wait for them.
pub fn deliver<A: Address, H: Serves>(
    (server, host): (&mut Server<A, H>, &mut H),
    answers: Vec<(RequestRef, Result<Answer, String>)>,
    fenced: &[u32],
) {
    if !fenced.is_empty() {
        server.end_where(host, End::Fenced, |session| fenced.contains(&H::number(session)));
    }
    let mut bytes = Vec::new();
    for (request, answered) in answers {
        let Some(session) = server.session_mut(request) else { continue };
        match host.respond(session, answered) {
            Ok(body) => answer::put_body(&mut bytes, &body),
            Err(reason) => answer::refuse(&mut bytes, &reason),
        }
        let _heard_or_not = server.answer(request, &bytes);
    }
}

/// Decodes the chain of a request. The bytes are untrusted input.
///
/// # Errors
/// The reason for which the chain is refused.
#[inline]
pub fn chain(bytes: &[u8]) -> Result<ChainView<'_>, String> {
    match ChainView::decode(bytes) {
        Ok((chain, [])) => Ok(chain),
        Ok(_) => Err("the chain has trailing bytes".to_owned()),
        Err(error) => Err(format!("the chain is malformed: {error}")),
    }
}

/// Decodes a request to the node itself. The bytes are untrusted input.
///
/// # Errors
/// The reason for which the request is refused.
pub fn parse(request: &[u8]) -> Result<Ask, String> {
    serde_json::from_slice(request).map_err(|error| format!("the request is not understood: {error}"))
}

/// Removes the key of a wide store from a response to a client that runs its own chains.
pub fn for_runner(answer: Answer) -> Answer {
    match answer {
        Answer::Store(store) if store.wide => Answer::Store(Store { secret: 0, ..store }),
        answer => answer,
    }
}
