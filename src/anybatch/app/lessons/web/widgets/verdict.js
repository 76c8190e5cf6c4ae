// The sentence that rewrites itself: what a loop did, from its numbers alone.
import { count, percent, times } from "ab/dom";
import { MEASURES as m } from "ab/measures";

export function verdict(found, right) {
  if (found.error) return `<strong>Python stops: ${found.error.kind}.</strong> ${escape(found.error.message)}.`;
  if (!found.updates.length) return "<strong>No update at all:</strong> nothing is ever stepped, so nothing is learnt.";
  const said = [rows(found), updates(found), rates(found)].filter(Boolean);
  if (!said.length) return `<strong>Exact:</strong> every row counts once in an epoch, and each of the ${count(found.updates.length)} updates has the gradient of its whole batch. ${losses(found, null)}`;
  return `<strong>${said.join("; ").replace("and yet;", "and yet")}.</strong> ${losses(found, right)}`;
}

function rows(found) {
  const total = count(found.counts.length), parts = [];
  const leaked = m.leaked(found), lost = m.lost(found) - leaked;
  if (leaked) parts.push(`${count(leaked)} of ${total} rows miss their own batch and are added to the first of the next epoch`);
  if (lost) parts.push(`${count(lost)} of ${total} rows never count`);
  if (m.much(found)) parts.push(`${count(m.much(found))} count too much (up to ${times(m.most(found))})`);
  if (m.little(found)) parts.push(`${count(m.little(found))} too little (down to ${times(m.least(found))})`);
  if (!parts.length && found.off) return "Every row counts once, and yet";
  return parts.join(", ");
}

function updates(found) {
  if (!found.off) return "";
  return `${count(found.off)} of ${count(found.updates.length)} updates have a wrong gradient, up to ${percent(found.worst)} off`;
}

function rates(found) {
  const wrong = found.updates.filter((update) => Math.abs(update.rate - update.wantedRate) > 1e-12).length;
  return wrong ? `the learning rate is not the planned one in ${count(wrong)} of ${count(found.updates.length)} updates` : "";
}

function losses(found, right) {
  const loss = m.loss(found).toFixed(3), epochs = found.setting.epochs;
  if (!right) return `Loss after ${epochs} epochs: ${loss}.`;
  const best = m.loss(right), difference = m.loss(found) - best;
  const told = Math.abs(difference) < 0.01 ? "The loss would not have told you."
    : difference < 0 ? "The loss is even lower, by accident: a gradient that is too large is a larger learning rate." : "The loss shows something, but not what.";
  return `Loss after ${epochs} epochs: ${loss}; the right loop has ${best.toFixed(3)}. ${told}`;
}

const escape = (text) => text.replace(/[&<]/g, (letter) => (letter === "&" ? "&amp;" : "&lt;"));
